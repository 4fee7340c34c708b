"""The router alone: RECIPE's rule, the three repairs, hot spots, the bounded table, and a GRPO trace."""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import routing

import proxy
from proxy import BLOCK, MAX_LEAD, Router

RANDOM = random.Random(0)


def ids(count):
    return [RANDOM.randrange(150_000) for _ in range(count)]


def blocks(tokens, model="v1"):
    return Router.blocks(hash(model), tokens)


def route(router, tokens, load, model="v1"):
    """One request as the fleet does it: recall, choose, remember."""
    router.recall(hash(model), blocks(tokens, model))
    owner, how = router.choose(blocks(tokens, model), load)
    router.remember(blocks(tokens, model), owner)
    return owner, how


def answered(router, prompt, answer, owner, model="v1"):
    """The answer was generated at `owner`."""
    known = blocks(prompt, model)
    chain = known[-1] if known else hash(model)
    router.heard(chain, prompt[len(known) * BLOCK :], json.dumps(answer).encode(), owner)


def test_only_whole_blocks_count_and_the_adapter_name_seeds_the_chain():
    prompt = ids(3 * BLOCK)
    assert len(blocks(prompt[:-1])) == 2 and len(blocks(prompt)) == 3
    assert blocks(prompt)[:2] == blocks(prompt + ids(5))[:2]
    assert not set(blocks(prompt, "v1")) & set(blocks(prompt, "v2"))
    moved = ids(BLOCK) + prompt  # the same tokens at another place are another prefix
    assert not set(blocks(moved)) & set(blocks(prompt))
    known = blocks(prompt[: 2 * BLOCK])
    assert Router.blocks(known[-1], prompt[2 * BLOCK :]) == blocks(prompt)[2:]


def test_affinity_then_spill_and_no_match_to_the_least_loaded():
    router, prompt = Router(), ids(64)
    first, how = route(router, prompt, {1: 5, 2: 0, 3: 7})
    assert (first, how) == (2, "unmatched")
    assert route(router, prompt, {1: 5, 2: MAX_LEAD, 3: 0}) == (2, "affinity")
    assert route(router, prompt, {1: 5, 2: MAX_LEAD + 1, 3: 0}) == (3, "spilled")


def test_ties_take_turns():
    router = Router()
    assert [route(router, ids(64), {1: 0, 2: 0, 3: 0})[0] for _ in range(6)].count(1) == 2


def test_after_a_spill_both_owners_count_and_the_less_loaded_gets_the_next():
    """Repair 1. With the first owner alone, or with the prefix forgotten, this goes to replica 1 or 3."""
    router, prompt = Router(), ids(64)
    route(router, prompt, {1: 0, 2: 9, 3: 9})
    assert route(router, prompt, {1: 20, 2: 0, 3: 5}) == (2, "spilled")
    assert route(router, prompt, {1: 6, 2: 4, 3: 0}) == (2, "affinity")
    assert route(router, prompt, {1: 3, 2: 4, 3: 0}) == (1, "affinity")


def test_a_prompt_that_every_replica_holds_is_still_specific():
    """Repair 2. If "everybody has it" meant common, this would be unmatched."""
    router, prompt = Router(), ids(64)
    for owner in (1, 2, 3):
        router.remember(blocks(prompt), owner)
    assert route(router, prompt, {1: 2, 2: 1, 3: 1}) in ((2, "affinity"), (3, "affinity"))


def test_a_block_with_two_successors_identifies_no_prompt_even_with_one_holder():
    """Repair 2, the other way round: one replica holds the template, and it is common all the same."""
    router, template = Router(), ids(4 * BLOCK)
    router.remember(blocks(template + ids(32)), 1)
    assert route(router, template + ids(32), {1: 1, 2: 0}) == (2, "unmatched")  # its own successor is the second
    assert route(router, template + ids(32), {1: 1, 2: 1})[1] == "unmatched"


def test_the_longest_match_wins():
    router, prompt = Router(), ids(8 * BLOCK)
    router.remember(blocks(prompt[: 4 * BLOCK]), 1)
    router.remember(blocks(prompt), 2)
    assert route(router, prompt, {1: 0, 2: MAX_LEAD}) == (2, "affinity")
    assert router.choose(blocks(prompt), {1: 0, 2: MAX_LEAD + 1}) == (1, "affinity")


def test_second_turns_of_a_group_go_where_their_answers_were_generated():
    """Repair 3, for all eight conversations. The answers are no successors of the prompt, which stays specific."""
    router, prompt = Router(), ids(100)
    load = {1: 0, 2: 0}
    answers = [ids(80) for _ in range(8)]
    owners = [1, 2, 1, 2, 2, 1, 1, 2]  # a spill has spread the group
    for answer, owner in zip(answers, owners, strict=True):
        router.remember(blocks(prompt), owner)
        answered(router, prompt, answer, owner)
    assert router.choose(blocks(prompt), load)[1] == "affinity"
    for answer, owner in zip(answers, owners, strict=True):
        assert route(router, prompt + answer + ids(40), load) == (owner, "affinity")


def test_a_short_prompts_answer_is_registered_too():
    router, prompt, answer = Router(), ids(BLOCK - 3), ids(50)
    answered(router, prompt, answer, 2)
    assert route(router, prompt + answer + ids(20), {1: 0, 2: 0}) == (2, "affinity")


def test_a_third_turn_goes_where_the_second_answer_was_generated():
    router, prompt, load = Router(), ids(70), {1: 0, 2: 0}
    for owner in (1, 2, 1):  # each turn elsewhere than the one before it
        router.remember(blocks(prompt), owner)
        answer = ids(50)
        answered(router, prompt, answer, owner)
        prompt = prompt + answer + ids(30)
        assert route(router, prompt, load) == (owner, "affinity")


def test_an_answer_that_no_turn_follows_takes_no_place_in_the_table():
    router, prompt = Router(), ids(70)
    for _ in range(8):
        answered(router, prompt, ids(300), route(router, prompt, {1: 0, 2: 0})[0])
    assert len(router.table) == len(blocks(prompt)) and router.unread > 8 * 300


def test_unread_answers_are_bounded_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr(proxy, "UNREAD_BYTES", 10_000)
    router, prompts, answers = Router(), [ids(70) for _ in range(20)], [ids(80) for _ in range(20)]
    for prompt, answer in zip(prompts, answers, strict=True):
        answered(router, prompt, answer, 1)
        assert router.unread <= 10_000
    for prompt, answer in zip(prompts, answers, strict=True):
        router.recall(hash("v1"), blocks(prompt + answer))
    assert router.unread == 0 and not router.answers
    found = [blocks(prompt + answer)[-1] in router.table for prompt, answer in zip(prompts, answers, strict=True)]
    assert found == sorted(found) and any(found) and not all(found)


def test_an_answer_that_is_no_list_of_ids_teaches_nothing():
    router, prompt = Router(), ids(64)
    for answer in (b"[1,2", b'[{"a":[1]},2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]', b"\xff"):
        router.heard(blocks(prompt)[-1], [], answer, 1)
    assert route(router, prompt + ids(40), {1: 0, 2: 1}) == (1, "unmatched")


def spread(prompts):
    """How many of `prompts`, sent one after the other, two idle replicas get."""
    router = Router()
    owners = [route(router, prompt, {1: 0, 2: 0})[0] for prompt in prompts]
    return sorted((owners.count(1), owners.count(2)))


def test_forty_prompts_one_after_the_other_spread_evenly():
    template = ids(23)
    assert spread([template + ids(112) for _ in range(40)]) == [20, 20]


def test_forty_prompts_behind_a_thousand_shared_tokens_spread_evenly():
    prefix = ids(1000)
    assert spread([prefix + ids(112) for _ in range(40)]) == [20, 20]


def test_forty_prompts_repeated_stay_where_they_are():
    router, template = Router(), ids(23)
    prompts = [template + ids(112) for _ in range(40)]
    first = [route(router, prompt, {1: 0, 2: 0})[0] for prompt in prompts]
    again = [route(router, prompt, {1: 0, 2: 0}) for prompt in prompts]
    assert again == [(owner, "affinity") for owner in first]


def test_the_table_is_bounded_and_the_least_recently_used_goes():
    router = Router(capacity=40)
    used, unused = ids(10 * BLOCK), ids(20 * BLOCK)
    router.remember(blocks(used), 1)
    router.remember(blocks(unused), 2)
    router.remember(blocks(used), 1)
    router.remember(blocks(ids(20 * BLOCK)), 2)
    assert len(router.table) == 40
    assert router.choose(blocks(used), {1: 0, 2: 0}) == (1, "affinity")
    assert all(block in router.table for block in blocks(used))
    assert not all(block in router.table for block in blocks(unused))


def test_the_tail_of_a_chain_is_forgotten_first():
    """Without its first block a chain could not be found at all."""
    router, prompt = Router(capacity=10), ids(10 * BLOCK)
    router.remember(blocks(prompt), 1)
    router.remember(blocks(ids(4 * BLOCK)), 2)
    assert [block in router.table for block in blocks(prompt)] == [True] * 6 + [False] * 4


def test_an_owner_that_left_is_not_asked_for():
    """A replica that comes back does so under a new number, with an empty cache."""
    router, prompt = Router(), ids(64)
    assert route(router, prompt, {1: 0, 2: 1}) == (1, "unmatched")
    assert route(router, prompt, {3: 5, 2: 1}) == (2, "unmatched")
    assert route(router, prompt, {3: 0, 2: 5}) == (2, "affinity")


def test_grpo_trace():
    """3 replicas, 384 in flight, 8 rollouts a prompt, a policy every 48 groups: what the recipe promises."""
    got = routing.simulate(routing.Ours(), list(routing.trace(500)))
    assert got["unmatched"] - got["floor"] < 0.01
    assert got["spilled"] < 0.02
    assert got["max_over_mean"] < 1.10
    robin = routing.simulate(routing.RoundRobin(), list(routing.trace(500)))
    assert got["found"] > robin["found"] + 0.1


def test_memory_of_the_table_is_what_the_docstring_says():
    measured = routing.memory(20_000)
    stated = int(Router.__doc__.split("takes about\n    ")[1].split()[0])
    assert 0.8 * stated < measured < 1.2 * stated
