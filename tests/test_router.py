"""The router alone: RECIPE's rule, the repairs, hot spots, the bounded table, and a GRPO trace."""

import random

import routing

from proxy import BLOCK, MAX_LEAD, Router

RANDOM = random.Random(0)


def ids(count):
    return [RANDOM.randrange(150_000) for _ in range(count)]


def blocks(tokens, policy="v1"):
    return Router.blocks(policy, tokens)


def route(router, tokens, load, policy="v1"):
    return router.route(blocks(tokens, policy), load)


def give(router, tokens, owner):
    """`owner` alone is in service when this prompt comes, so it gets it."""
    assert route(router, tokens, {owner: 0})[0] == owner


def test_only_whole_blocks_count_and_the_adapter_name_seeds_the_chain():
    prompt = ids(3 * BLOCK)
    assert len(blocks(prompt[:-1])) == 2 and len(blocks(prompt)) == 3
    assert blocks(prompt)[:2] == blocks(prompt + ids(5))[:2]
    assert not set(blocks(prompt, "v1")) & set(blocks(prompt, "v2"))
    moved = ids(BLOCK) + prompt  # the same tokens at another place are another prefix
    assert not set(blocks(moved)) & set(blocks(prompt))


def test_tokens_that_are_no_numbers_are_blocks_like_others():
    """vLLM refuses them; the router must not fall over them first."""
    strange = [[1], {"a": 2}, None, "x"] * BLOCK
    assert len(blocks(strange)) == 4 and blocks(strange) == blocks(list(strange))


def test_affinity_then_spill_and_no_match_to_the_least_loaded():
    router, prompt = Router(), ids(64)
    assert route(router, prompt, {1: 5, 2: 0, 3: 7}) == (2, "unmatched")
    assert route(router, prompt, {1: 5, 2: MAX_LEAD, 3: 0}) == (2, "affinity")
    assert route(router, prompt, {1: 5, 2: MAX_LEAD + 1, 3: 0}) == (3, "spilled")


def test_ties_take_turns():
    router = Router()
    assert [route(router, ids(64), {1: 0, 2: 0, 3: 0})[0] for _ in range(6)].count(1) == 2


def test_a_prompt_without_a_whole_block_goes_to_the_least_loaded():
    router, prompt = Router(), ids(BLOCK - 1)
    assert route(router, prompt, {1: 1, 2: 0}) == (2, "unmatched")
    assert route(router, prompt, {1: 0, 2: 1}) == (1, "unmatched")


def test_after_a_spill_both_owners_count_and_the_less_loaded_gets_the_next():
    """With the first owner alone, or with the prefix forgotten, this goes to replica 1 or 3."""
    router, prompt = Router(), ids(64)
    route(router, prompt, {1: 0, 2: 9, 3: 9})
    assert route(router, prompt, {1: 20, 2: 0, 3: 5}) == (2, "spilled")
    assert route(router, prompt, {1: 6, 2: 4, 3: 0}) == (2, "affinity")
    assert route(router, prompt, {1: 3, 2: 4, 3: 0}) == (1, "affinity")


def test_a_prompt_that_every_replica_holds_is_still_specific():
    """If "everybody has it" meant common, this would be unmatched."""
    router, prompt = Router(), ids(64)
    for owner in (1, 2, 3):
        give(router, prompt, owner)
    assert route(router, prompt, {1: 2, 2: 1, 3: 1}) in ((2, "affinity"), (3, "affinity"))


def test_a_block_with_two_successors_identifies_no_prompt_even_with_one_holder():
    """One replica holds the template, and it is common all the same."""
    router, template = Router(), ids(4 * BLOCK)
    give(router, template + ids(32), 1)
    # its own successor is the second one
    assert route(router, template + ids(32), {1: 1, 2: 0}) == (2, "unmatched")
    assert route(router, template + ids(32), {1: 1, 2: 1})[1] == "unmatched"


def test_the_longest_match_wins():
    router, prompt = Router(), ids(8 * BLOCK)
    give(router, prompt[: 4 * BLOCK], 1)
    give(router, prompt, 2)
    assert route(router, prompt, {1: 0, 2: MAX_LEAD}) == (2, "affinity")
    assert route(router, prompt, {1: 0, 2: MAX_LEAD + 1}) == (1, "affinity")


def test_second_turns_go_where_their_prompt_is():
    """Eight conversations per prompt, three turns each. Their answers do not make the prompt a
    template, so the next rollout finds it, too."""
    router, prompts = Router(), [ids(23) + ids(112) for _ in range(40)]
    home = [route(router, prompt, {1: 0, 2: 0})[0] for prompt in prompts]
    for prompt, owner in zip(prompts, home):
        for _ in range(8):
            second = prompt + ids(80)
            assert route(router, second, {1: 0, 2: 0}) == (owner, "affinity")
            assert route(router, second + ids(80), {1: 0, 2: 0}) == (owner, "affinity")
        assert route(router, prompt, {1: 0, 2: 0}) == (owner, "affinity")


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
    give(router, used, 1)
    give(router, unused, 2)
    give(router, used, 1)
    give(router, ids(20 * BLOCK), 2)
    assert len(router.table) == 40
    assert route(router, used, {1: 0, 2: 0}) == (1, "affinity")
    assert not all(block in router.table for block in blocks(unused))


def test_the_tail_of_a_chain_is_forgotten_first():
    """Without its first block a chain could not be found at all."""
    router, prompt = Router(capacity=10), ids(10 * BLOCK)
    give(router, prompt, 1)
    give(router, ids(4 * BLOCK), 2)
    assert [block in router.table for block in blocks(prompt)] == [True] * 6 + [False] * 4


def test_an_owner_that_left_is_not_asked_for():
    """A replica that comes back does so under a new number, with an empty cache."""
    router, prompt = Router(), ids(64)
    assert route(router, prompt, {1: 0, 2: 1}) == (1, "unmatched")
    assert route(router, prompt, {3: 5, 2: 1}) == (2, "unmatched")
    assert route(router, prompt, {3: 0, 2: 5}) == (2, "affinity")


def test_grpo_trace():
    """3 replicas, 384 in flight, 8 rollouts per prompt, a policy every 48 groups."""
    got = routing.simulate(routing.Ours(), list(routing.trace(500)))
    assert got["unmatched"] - got["floor"] < 0.01
    assert got["affinity"] > 0.86 and got["spilled"] < 0.02
    assert got["max_over_mean"] < 1.10
    robin = routing.simulate(routing.RoundRobin(), list(routing.trace(500)))
    assert got["found"] > robin["found"] + 0.1


def test_second_turns_of_the_grpo_trace_go_home():
    """RECIPE's load in conversations of two turns: 95 % find their first prompt's blocks."""
    requests = list(routing.trace(300, turns=2))
    assert routing.simulate(routing.Ours(), requests)["home"] > 0.95
    assert routing.simulate(routing.Post(), requests)["home"] < 0.85


def test_the_tables_memory_is_what_its_constant_says():
    """95 MB for 500,000 blocks."""
    assert 0.8 * 95e6 / 500_000 < routing.memory(20_000) < 1.2 * 95e6 / 500_000
