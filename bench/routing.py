"""How well each routing rule finds prefixes, on one GRPO trace.

    python bench/routing.py            # two tables, a minute; nothing is sent anywhere
    python bench/routing.py --memory   # bytes per block in the router's table

The trace is the recipe's: 8 rollouts per prompt, 384 in flight and refilled one by one, 3 replicas,
and a new policy every 48 groups, which needs its prefixes computed anew. Three rules route it:

    ours         proxy.py's Router
    post         the write-up's rule: a spilled prefix stays its first owner's, and a block is
                 common when every replica has it
    round robin  the next replica, whichever it is

`unmatched` has a floor: the first rollout of each (prompt, policy) pair cannot find what nobody
computed. `prefix found` is the share of all prompt tokens that were in the chosen replica's prefix
cache (without bounds, by policy). The second table has conversations of two turns: `goes home` is
the share of second turns that are sent where all whole blocks of their first prompt are, which is
everywhere after eight rounds of round robin. You should see 86 % affinity for ours in the first
table, and at least 95 % goes home in the second.
"""

import argparse
import collections
import heapq
import random
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import say

from proxy import BLOCK, MAX_LEAD, Router

REPLICAS, IN_FLIGHT, ROLLOUTS, GROUPS_A_POLICY = 3, 384, 8, 48


class RoundRobin:
    def __init__(self):
        self.turn = -1

    def route(self, blocks, load):
        self.turn += 1
        return self.turn % len(load), "turn"


class Post:
    """The write-up's rule: affinity within MAX_LEAD of the least loaded, else the least loaded."""

    def __init__(self):
        self.owners, self.next, self.turn = {}, {}, -1

    def route(self, blocks, load):
        depth, common, alive = dict.fromkeys(load, 0), 0, set(load)
        for k, block in enumerate(blocks, 1):
            alive &= self.owners.get(block, set())
            depth.update(dict.fromkeys(alive, k))
            if len(self.owners.get(block, ())) == len(load) or len(self.next.get(block, ())) > 1:
                common = k
        best, least = max(load, key=lambda i: (depth[i], -load[i])), min(load.values())
        how = "affinity" if depth[best] > common else "unmatched"
        if how == "affinity" and load[best] > least + MAX_LEAD:
            how = "spilled"
        if how != "affinity":
            idle = [i for i in load if load[i] == least]
            self.turn += 1
            best = idle[self.turn % len(idle)]
        for k, block in enumerate(blocks):
            if how != "spilled":
                self.owners.setdefault(block, set()).add(best)
            self.next.setdefault(block, set()).update(blocks[k + 1 : k + 2])
        return best, how


Ours = Router


def trace(groups, seed=0, turns=1):
    """(policy, prompt ids, tokens of its answer, ids of the turn before or None) of each request,
    in the order in which the rollout worker asks: a group's rollouts in a row. Second turns come
    384 requests later, because no answer comes at once."""
    rng, later = random.Random(seed), collections.deque()
    template = [rng.randrange(150_000) for _ in range(23)]
    for group in range(groups):
        # MATH questions: 80 tokens, some far longer
        size = min(600, int(rng.lognormvariate(4.4, 0.6)) + 8)
        prompt = template + [rng.randrange(150_000) for _ in range(size)]
        hard = rng.lognormvariate(0, 0.5)
        for _ in range(ROLLOUTS):
            # 700 tokens on average, 2 % cut at 3,000
            length = min(3000, 20 + int(hard * rng.lognormvariate(6.3, 0.6)))
            policy = f"trl-policy-v{group // GROUPS_A_POLICY}"
            yield policy, prompt, length, None
            if turns > 1:
                turn = prompt + [rng.randrange(150_000) for _ in range(length + 40)]
                later.append((policy, turn, length, prompt))
            while len(later) > IN_FLIGHT:
                yield later.popleft()
    yield from later


def simulate(rule, requests, in_flight=IN_FLIGHT, replicas=REPLICAS):
    """Route `requests` as they come. A rollout takes 15 ms per token, give or take 10 %."""
    rng, clock, running = random.Random(1), 0.0, []
    load, served = dict.fromkeys(range(replicas), 0), [0] * replicas
    cache = [set() for _ in range(replicas)]
    count, pairs, home = collections.Counter(), set(), []
    tokens = found = 0
    for number, (policy, prompt, length, before) in enumerate(requests):
        if len(running) == in_flight:
            clock, _, owner = heapq.heappop(running)
            load[owner] -= 1
        blocks = Router.blocks(policy, prompt)
        owner, how = rule.route(blocks, load)
        count[how] += 1
        load[owner] += 1
        served[owner] += 1
        if before:
            home.append(cache[owner].issuperset(Router.blocks(policy, before)))
        else:
            pairs.add(blocks[-1])
        tokens += len(prompt)
        for block in blocks:  # prefixes: the first one that is missing ends the match
            if block not in cache[owner]:
                break
            found += BLOCK
        cache[owner].update(blocks)
        ends = clock + length * 0.015 * rng.uniform(0.9, 1.1)
        heapq.heappush(running, (ends, number, owner))
    total = number + 1
    shares = {how: count[how] / total for how in ("affinity", "spilled", "unmatched")}
    shares |= {"floor": len(pairs) / total, "found": found / tokens}
    shares["home"] = sum(home) / len(home) if home else 0.0
    return shares | {"max_over_mean": max(served) * replicas / total}


def memory(blocks=100_000):
    """Bytes that one block of the table takes, with prompts as the trace has them."""
    rng, router = random.Random(0), Router(capacity=blocks)
    tracemalloc.start()
    while len(router.table) < blocks:
        prompt = [rng.randrange(150_000) for _ in range(130)]
        router.route(Router.blocks("trl-policy-v1", prompt), {1: 0, 2: 0, 3: 0})
    return tracemalloc.get_traced_memory()[0] / blocks


def table(requests, *columns):
    """Each rule's figures for one trace, a line per rule."""
    row = "{:12}" + " {:>13}" * len(columns)
    say(row.format("rule", *(title for title, _, _ in columns)))
    for name, rule in (("ours", Ours()), ("post", Post()), ("round robin", RoundRobin())):
        got = simulate(rule, requests)
        say(row.format(name, *(f"{got[key]:{form}}" for _, key, form in columns)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=1500, help="prompts, of 8 rollouts each")
    parser.add_argument("--memory", action="store_true", help="measure the table instead")
    options = parser.parse_args()
    if options.memory:
        return say(f"{memory():.0f} bytes per block")
    requests = list(trace(options.groups))
    flow = f"{IN_FLIGHT} in flight on {REPLICAS} replicas, {GROUPS_A_POLICY} groups per policy"
    say(f"{len(requests)} rollouts, {flow}")
    found, balance = ("prefix found", "found", ".2%"), ("max/mean", "max_over_mean", ".3f")
    shares = [(how, how, ".2%") for how in ("affinity", "spilled", "unmatched")]
    table(requests, *shares, ("its floor", "floor", ".2%"), balance, found)
    say("\nthe same with a second turn for each")
    requests = list(trace(options.groups // 3, turns=2))
    table(requests, *shares, ("goes home", "home", ".2%"), balance, found)


if __name__ == "__main__":
    main()
