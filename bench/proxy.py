"""How fast is proxy.py? Measured beside an asyncio proxy (asyncio_proxy.py), alternating, in one
run.

    python bench/proxy.py            # about 2 minutes on two cores; needs aiohttp
    python bench/proxy.py --quick    # half a minute, noisier

Two fake replicas answer at once with 300 tokens; a closed loop of 1, 64 and 384 connections asks
for 135-token prompts, 8 rollouts each; every contender has its turn in each of several rounds, and
the medians count. Then the recipe's own load, four times over: 384 connections whose answers take 4
s. There the proxy's cost is what it adds to the time of the same requests sent straight to the
fakes, at the same time, and the share of a core it uses.

A machine is never quiet: look at the ratios and the differences, not at the times. Wanted: at least
0.8 of asyncio's requests per second; with 4 s answers at most 2 ms more at the median, 30 ms more
at the 99th percentile and 0.2 of a core. Exits 1 if something is missed.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from aiohttp import web
from chaos import free_port, say

HERE = Path(__file__).resolve().parent
PROXY, YARDSTICK = HERE.parent / "proxy.py", HERE / "asyncio_proxy.py"
DELAY_S = 4.0  # of an answer in the second part; 384 in flight make 96 requests per second


def fake_replica(port, delay, tokens=300):
    """A replica that answers completions after `delay` s with `tokens` tokens, and whatever else at
    once."""
    logprobs = {
        "token_logprobs": [-1.234567] * tokens,
        "tokens": ["abc"] * tokens,
        "top_logprobs": [None] * tokens,
    }
    choice = {
        "index": 0,
        "text": "abc" * tokens,
        "token_ids": list(range(tokens)),
        "logprobs": logprobs,
    }
    body = json.dumps({"id": "x", "choices": [choice], "usage": {}}, separators=(",", ":")).encode()

    async def complete(request):
        await request.read()
        await asyncio.sleep(delay)
        return web.Response(body=body, content_type="application/json")

    async def other(_):
        return web.json_response({})

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/completions", complete)
    app.router.add_route("*", "/{tail:.*}", other)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, backlog=2048)


def requests_of(count, seed):
    """`count` request bodies: prompts of 135 tokens with a template of 23 in common, 8 rollouts
    each."""
    rng = random.Random(seed)
    template = [rng.randrange(150_000) for _ in range(23)]
    for _ in range(count // 8):
        prompt = template + [rng.randrange(150_000) for _ in range(112)]
        body = {
            "model": "base",
            "prompt": prompt,
            "max_tokens": 3000,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        yield from [json.dumps(body).encode()] * 8


async def drive(urls, connections, count, stagger, seed):
    """Send `count` requests over `connections`, which begin within `stagger` s: (seconds in all,
    their latencies)."""
    work, latencies = iter(list(requests_of(count, seed))), []
    headers, limit = {"Content-Type": "application/json"}, aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(
        connector=limit, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:

        async def worker(number):
            url = f"{urls[number % len(urls)]}/v1/completions"
            await asyncio.sleep(stagger * number / connections)
            for body in work:
                begin = time.perf_counter()
                async with session.post(url, data=body, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == 200, f"{url}: {answer.status}"
                latencies.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        await asyncio.gather(*(worker(number) for number in range(connections)))
        return time.perf_counter() - begin, sorted(latencies)


def cpu_s(pid):
    """Seconds of CPU that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(contenders, connections, count, seed, stagger=0.0):
    """Drive `contenders`, together if there are several, so that the machine's noise is the same
    for all of them."""

    async def all_of_them():
        driven = [drive(urls, connections, count, stagger, seed) for urls, _ in contenders.values()]
        return await asyncio.gather(*driven)

    processes = {name: process.pid for name, (_, process) in contenders.items() if process}
    begin, before = time.perf_counter(), {name: cpu_s(pid) for name, pid in processes.items()}
    results, figures = asyncio.run(all_of_them()), {}
    wall = time.perf_counter() - begin
    spent = {name: cpu_s(pid) - before[name] for name, pid in processes.items()}
    for name, (took, latencies) in zip(contenders, results, strict=True):
        p50, p99 = latencies[len(latencies) // 2] * 1e3, latencies[int(len(latencies) * 0.99)] * 1e3
        figures[name] = {
            "rps": len(latencies) / took,
            "p50": p50,
            "p99": p99,
            "cpu": spent.get(name, 0.0) / wall,
        }
    return figures


def medians(rounds):
    """{contender: {figure: its median}} of several rounds."""
    return {
        name: {
            key: statistics.median(figures[name][key] for figures in rounds)
            for key in rounds[0][name]
        }
        for name in rounds[0]
    }


def alternate(contenders, repeat, connections, count):
    """`repeat` rounds in which every contender has its turn alone, in another order each time."""
    rounds = []
    for turn in range(repeat):
        names = collections.deque(contenders)
        names.rotate(turn)
        figures = [measure({name: contenders[name]}, connections, count, turn) for name in names]
        rounds.append(dict(collections.ChainMap(*figures)))
    return medians(rounds)


@contextlib.contextmanager
def servers(delay):
    """Two fakes, and both proxies in front of them: {name: (URLs, process)}."""
    started, log = [], tempfile.TemporaryFile()  # noqa: SIM115

    def start(*command, **env):
        command, env = [sys.executable, *map(str, command)], {**os.environ, **env}
        started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return started[-1]

    try:
        ports = [free_port() for _ in range(4)]
        fakes = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        url = "http://127.0.0.1:{}".format
        for port in ports[:2]:
            start(__file__, "--fake", port, "--delay", delay)
        theirs = start(YARDSTICK, ports[2], ",".join(fakes), "token")
        ours = start(
            PROXY, REPLICA_URLS=",".join(fakes), HF_TOKEN="token", PROXY_PORT=str(ports[3])
        )
        contenders = {
            "direct": (fakes, None),
            "asyncio": ([url(ports[2])], theirs),
            "ours": ([url(ports[3])], ours),
        }
        for urls, _ in contenders.values():
            for address in urls:
                asyncio.run(ready(f"{address}/health"))
        yield contenders
    finally:
        for process in started:
            process.kill()
            process.wait()


async def ready(url, seconds=30):
    until = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    sys.exit(f"{url} did not answer 200 within {seconds} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument(
        "--fake", type=int, metavar="PORT", help="be a fake replica (the bench starts them)"
    )
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="S", help="of the fake's answers"
    )
    options = parser.parse_args()
    if options.fake:
        return fake_replica(options.fake, options.delay)
    repeat, scale, missed = (3, 0.3, []) if options.quick else (5, 1.0, [])
    row = "{:>11} {:8} {:>8} {:>8} {:>8} {:>9} {:>8}".format
    say(
        row("connections", "", "req/s", "p50 ms", "p99 ms", "req/s x", "p99 x")
        + "   wanted: req/s >= 0.8"
    )
    with servers(delay=0) as contenders:
        for connections, count in ((1, 800), (64, 4000), (384, 4000)):
            got = alternate(contenders, repeat, connections, int(count * scale) // 8 * 8)
            speed, tail = (got["ours"][key] / got["asyncio"][key] for key in ("rps", "p99"))
            missed += [f"{connections} connections"] * (speed < 0.8)
            for name in contenders:
                ratios = (f"{speed:.2f}", f"{tail:.2f}") if name == "ours" else ("", "")
                say(
                    row(
                        connections,
                        name,
                        *(f"{got[name][key]:.1f}" for key in ("rps", "p50", "p99")),
                        *ratios,
                    )
                )
    say(
        f"\n384 connections, {DELAY_S:.0f} s answers: added to the direct time; "
        "wanted: <= 2 ms, <= 30 ms, <= 0.2"
    )
    with servers(delay=DELAY_S) as contenders:
        got = medians(
            [
                measure(contenders, 384, 384 * 4, turn, stagger=DELAY_S)
                for turn in range(repeat // 2)
            ]
        )
        for name in ("asyncio", "ours"):
            added = {key: got[name][key] - got["direct"][key] for key in ("p50", "p99")}
            cost = f"p50 {added['p50']:+.1f} ms, p99 {added['p99']:+.1f} ms, "
            cost += f"{got[name]['cpu']:.2f} of a core"
            say(f"{name:>19} {cost}")
        missed += ["4 s answers"] * (
            added["p50"] > 2 or added["p99"] > 30 or got["ours"]["cpu"] > 0.2
        )
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
