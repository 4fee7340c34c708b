"""How well each routing rule finds prefixes, on one GRPO trace.

    python bench/routing.py            # a table, a few seconds; nothing is sent anywhere
    python bench/routing.py --memory   # bytes a tracked block takes

The trace is the recipe's: 8 rollouts a prompt, 384 in flight and refilled one by one, 3 replicas, and a new policy
every 48 groups, which need their prefixes computed anew. Three rules route it:

    ours         proxy.py's Router
    post         the write-up's rule: a spilled prefix stays its first owner's, a block is common when every replica
                 has it
    round robin  whoever is next

`unmatched` has a floor: the first rollout of each (prompt, policy) pair can't find what nobody computed. `prefix found`
is the share of all prompt tokens that were in the chosen replica's prefix cache (a cache without bounds, by policy).
"""

import argparse
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


class Ours:
    def __init__(self):
        self.router = Router()

    def route(self, blocks, load):
        owner, how = self.router.choose(blocks, load)
        self.router.remember(blocks, owner)
        return owner, how


def trace(groups, seed=0):
    """[(policy, prompt ids, answer's tokens)], in the order the rollout worker asks: a group's rollouts in a row."""
    rng = random.Random(seed)
    template = [rng.randrange(150_000) for _ in range(23)]
    for group in range(groups):
        size = min(600, int(rng.lognormvariate(4.4, 0.6)) + 8)  # MATH questions: 80 tokens, some far longer
        prompt = template + [rng.randrange(150_000) for _ in range(size)]
        hard = rng.lognormvariate(0, 0.5)
        for _ in range(ROLLOUTS):
            length = min(3000, 20 + int(hard * rng.lognormvariate(6.3, 0.6)))  # 700 tokens on average, 2 % cut at 3,000
            yield f"trl-policy-v{group // GROUPS_A_POLICY}", prompt, length


def simulate(rule, requests, in_flight=IN_FLIGHT, replicas=REPLICAS):
    """Route `requests` as they come. A rollout takes its tokens times 15 ms, give or take 10 %."""
    rng, clock, running = random.Random(1), 0.0, []
    load, served, cache = dict.fromkeys(range(replicas), 0), [0] * replicas, [set() for _ in range(replicas)]
    count, tokens, found, pairs = {"affinity": 0, "spilled": 0, "unmatched": 0, "turn": 0}, 0, 0, set()
    for number, (model, prompt, length) in enumerate(requests):
        if len(running) == in_flight:
            clock, _, owner = heapq.heappop(running)
            load[owner] -= 1
        blocks = Router.blocks(hash(model), prompt)
        owner, how = rule.route(blocks, load)
        count[how] += 1
        load[owner] += 1
        served[owner] += 1
        pairs.add((model, blocks[-1]))
        tokens += len(prompt)
        for block in blocks:  # prefixes: the first one that is missing ends the match
            if block not in cache[owner]:
                break
            found += BLOCK
        cache[owner].update(blocks)
        ends = clock + length * 0.015 * rng.uniform(0.9, 1.1)
        heapq.heappush(running, (ends, number, owner))
    total = number + 1
    shares = {how: n / total for how, n in count.items()}
    return {
        **shares,
        "floor": len(pairs) / total,
        "max_over_mean": max(served) * replicas / total,
        "found": found / tokens,
    }


def memory(blocks=100_000):
    """Bytes that one tracked block takes, in blocks of prompts as the trace has them."""
    rng, router = random.Random(0), Router(capacity=blocks)
    tracemalloc.start()
    while len(router.table) < blocks:
        prompt = [rng.randrange(150_000) for _ in range(130)]
        router.remember(Router.blocks(hash("trl-policy-v1"), prompt), rng.randrange(1, 4))
    return tracemalloc.get_traced_memory()[0] / blocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=1500, help="prompts in the trace, of 8 rollouts each")
    parser.add_argument("--memory", action="store_true", help="measure the table instead")
    options = parser.parse_args()
    if options.memory:
        return say(f"{memory():.0f} bytes a tracked block")
    requests = list(trace(options.groups))
    say(f"{len(requests)} rollouts, {IN_FLIGHT} in flight on {REPLICAS} replicas, {GROUPS_A_POLICY} groups a policy")
    row = "{:12} {:>9} {:>9} {:>10} {:>10} {:>9} {:>13}".format
    say(row("rule", "affinity", "spilled", "unmatched", "its floor", "max/mean", "prefix found"))
    for name, rule in (("ours", Ours()), ("post", Post()), ("round robin", RoundRobin())):
        got = simulate(rule, requests)
        shares = [f"{got[key]:.2%}" for key in ("affinity", "spilled", "unmatched", "floor")]
        say(row(name, *shares, f"{got['max_over_mean']:.3f}", f"{got['found']:.2%}"))


if __name__ == "__main__":
    main()
