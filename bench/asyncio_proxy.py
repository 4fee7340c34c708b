"""The yardstick of bench/proxy.py: an asyncio proxy (aiohttp) with the write-up's routing rule and
nothing else.

    python bench/asyncio_proxy.py PORT URL,URL,... TOKEN

No adapters, no health, no second tries: what a reader would write in an hour, and the speed to
measure against."""

import collections
import hashlib
import json
import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

BLOCK, MAX_LEAD, TABLE_BLOCKS = 16, 8, 500_000


def chain(model, tokens):
    """Chained hashes of the whole blocks of `tokens`, seeded with the model's name."""
    link, out = hashlib.blake2b(model.encode(), digest_size=16).digest(), []
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        link = hashlib.blake2b(
            link + json.dumps(tokens[i : i + BLOCK]).encode(), digest_size=16
        ).digest()
        out.append(link)
    return out


class Balancer:
    def __init__(self, replicas):
        self.inflight, self.turn = [0] * replicas, 0
        # {block: (replicas that have it, up to two blocks seen after it)}
        self.table = collections.OrderedDict()

    def pick(self, model, tokens):
        blocks, everyone = chain(model, tokens), range(len(self.inflight))
        depth, alive, common = [0] * len(everyone), set(everyone), 0
        for k, block in enumerate(blocks, 1):
            if block not in self.table:
                break
            owners, successors = self.table[block]
            if len(owners) == len(everyone) or len(successors) > 1:
                common = k
            alive &= owners
            for i in alive:
                depth[i] = k
        least = min(self.inflight)
        best = max(everyone, key=lambda i: (max(0, depth[i] - common), -self.inflight[i]))
        if depth[best] <= common or self.inflight[best] > least + MAX_LEAD:
            idle = [i for i in everyone if self.inflight[i] == least]
            best, self.turn = idle[self.turn % len(idle)], self.turn + 1
        for k, block in enumerate(blocks):
            owners, successors = self.table.setdefault(block, (set(), set()))
            owners.add(best)
            if len(successors) < 2:
                successors.update(blocks[k + 1 : k + 2])
            self.table.move_to_end(block)
        while len(self.table) > TABLE_BLOCKS:
            self.table.popitem(last=False)
        return best


def application(urls, token):
    balancer, session = Balancer(len(urls)), []
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    async def lifetime(_):
        async with ClientSession(
            connector=TCPConnector(limit=1024), timeout=ClientTimeout(total=None)
        ) as client:
            session.append(client)
            yield

    async def handle(request):
        body = await request.read()
        if request.path != "/v1/completions":
            return web.json_response({})
        data = json.loads(body)
        i = balancer.pick(data["model"], data["prompt"])
        balancer.inflight[i] += 1
        try:
            async with session[0].post(
                urls[i] + request.path_qs, data=body, headers=headers
            ) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type="application/json"
                )
        finally:
            balancer.inflight[i] -= 1

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(lifetime)
    app.router.add_route("*", "/{tail:.*}", handle)
    return app


if __name__ == "__main__":
    port, urls, token = sys.argv[1:]
    web.run_app(
        application(urls.split(","), token),
        host="127.0.0.1",
        port=int(port),
        print=None,
        access_log=None,
    )
