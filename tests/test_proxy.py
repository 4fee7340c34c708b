"""proxy.py in front of fake replicas: what passes through, how it is routed, what a weight sync costs, what is seen."""

import asyncio
import importlib.util
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fake_vllm
from fake_vllm import BASE, FakeVLLM, running_proxy, wait_until

import proxy

PROXY = Path(__file__).resolve().parent.parent / "proxy.py"
RANDOM = random.Random(0)
TOKEN = "hf_secretsecret"


def ids(count):
    return [RANDOM.randrange(150_000) for _ in range(count)]


def ask(url, prompt, model=BASE, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "n": 1, "logprobs": 0, "return_token_ids": True}
    return requests.post(f"{url}/v1/completions", json={**body, **fields}, timeout=30)


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def load(url, name, path):
    return requests.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout=30)


def unload(url, name):
    return requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=30)


def stats(url):
    return requests.get(f"{url}/stats", timeout=10).json()


def in_background(call, *args, **kwargs):
    """A future of `call`, in a thread that does not outlive the test by much."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **kwargs)
    pool.shutdown(wait=False)
    return future


def raw(url, data, shut=False, seconds=10):
    """Send bytes, return all that comes back until the proxy closes."""
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=seconds) as sock:
        sock.sendall(data)
        if shut:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(65536):
            answer += part
        return answer


@pytest.fixture
def two():
    """Two replicas that see the same bucket."""
    bucket = {f"/lora/v{n}": f"weights-{n}" for n in range(1, 12)}
    with FakeVLLM(TOKEN, bucket) as one, FakeVLLM(TOKEN, bucket) as other:
        yield one, other


# ---- what passes through


def test_a_completion_is_passed_on_with_the_token_and_comes_back_as_it_was(two):
    with running_proxy(two, TOKEN) as url:
        prompt = ids(40)
        answer = ask(url, prompt)
        assert text(answer) == "base" and answer.json()["choices"][0]["prompt_token_ids"] == prompt
        assert answer.headers["Content-Type"] == "application/json"
        replica = two[int(answer.headers["X-Replica"])]
        sent = {"model": BASE, "prompt": prompt, "max_tokens": 64, "n": 1, "logprobs": 0, "return_token_ids": True}
        assert replica.completions() == [sent]
        assert len(two[0].completions() + two[1].completions()) == 1


def test_questions_get_one_replicas_answer(two):
    with running_proxy(two, TOKEN) as url:
        assert requests.get(f"{url}/v1/models").json()["data"][0]["id"] == BASE
        info = requests.get(f"{url}/server_info", params={"config_format": "json"}).json()
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
        assert requests.get(f"{url}/get_world_size").json() == {"world_size": 1}
        assert requests.get(f"{url}/no/such/path").status_code == 404
        assert len(two[0].calls("/get_world_size") + two[1].calls("/get_world_size")) == 1


def test_a_question_that_a_replica_fails_takes_it_not_out(two):
    for fake in two:
        fake.sick["/get_world_size"] = (500, "not implemented")
    with running_proxy(two, TOKEN) as url:
        assert requests.get(f"{url}/get_world_size").status_code == 500
        assert stats(url)["ejected"] == 0


def test_other_posts_reach_every_replica(two):
    with running_proxy(two, TOKEN) as url:
        before = [fake.resets for fake in two]
        assert requests.post(f"{url}/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
        assert [fake.resets for fake in two] == [count + 1 for count in before]
        two[1].sick["/sleep"] = (500, "no")
        two[0].sick["/sleep"] = (200, "yes")
        assert requests.post(f"{url}/sleep").status_code == 500


def test_chat_completions_go_to_one_replica(two):
    with running_proxy(two, TOKEN) as url:
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
        assert requests.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        assert len(two[0].completions() + two[1].completions()) == 1


def test_a_completion_without_a_model_is_the_base_models(two):
    with running_proxy(two, TOKEN) as url:
        assert text(requests.post(f"{url}/v1/completions", json={"prompt": "1+1="})) == "base"


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("packed", [False, True])
def test_answers_arrive_intact_however_they_are_framed(two, framing, packed):
    for fake in two:
        fake.body, fake.gzip, fake.tokens = framing, packed, 500
    with running_proxy(two, TOKEN) as url, requests.Session() as session:
        for _ in range(3):
            answer = session.post(f"{url}/v1/completions", json={"model": BASE, "prompt": ids(20)})
            tokens = answer.json()["choices"][0]["token_ids"]
            assert len(tokens) == 500 and tokens == list(range(tokens[0], tokens[0] + 500))


def test_a_stream_passes_as_it_comes(two):
    with running_proxy(two, TOKEN) as url:
        for fake in two:
            fake.events = threading.Semaphore(0)
        answer = requests.post(f"{url}/v1/completions", json={"prompt": ids(20), "stream": True}, stream=True)
        fake = two[int(answer.headers["X-Replica"])]
        lines = answer.iter_lines()
        for _ in range(3):
            fake.events.release()  # the next event is not made before this one has arrived
            assert next(line for line in lines if line).startswith(b'data: {"id"')
        fake.events.release()
        assert [line for line in lines if line] == [b"data: [DONE]"]
        wait_until(lambda: sum(replica["inflight"] for replica in stats(url)["replicas"]) == 0)


def test_replicas_over_https_with_a_certificate_of_ones_own(tmp_path, monkeypatch):
    """The way to Jobs. A TLS 1.3 server sends tickets after the handshake: bytes on the socket that are no answer."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with FakeVLLM(TOKEN, tls=tls) as fake:
        with running_proxy([fake], TOKEN, ready=False) as url:
            wait_until(lambda: "SSLError: self-signed certificate" in stats(url)["replicas"][0]["reason"])
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with running_proxy([fake], TOKEN) as url:
            fake.tokens = 5000
            for _ in range(3):
                assert text(ask(url, ids(2000), max_tokens=5000)) == "base"
            fake.mode = "hang"
            client = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 16\r\n\r\n{"prompt": "hi"}')
            wait_until(lambda: fake.active == 1)
            client.close()
            wait_until(lambda: fake.active == 0, seconds=2)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 this is not http\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 400),
        (b"DELETE /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", 405),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1e9\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 500\r\n\r\n{", 400),
    ],
)
def test_what_is_not_a_request_gets_a_4xx_and_the_connection_is_closed(two, data, status):
    with running_proxy(two, TOKEN) as url:
        answer = raw(url, data, shut=True)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{not json",
        b"[" * 100_000,
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"model": "v1"}',
        b'{"prompt": []}',
        b'{"prompt": 5}',
        b'{"model": 7, "prompt": "hi"}',
        b'{"prompt": [1, 2, 3, [4], 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]}',
        b"\xff\xfe",
    ],
)
def test_a_completion_that_makes_no_sense_gets_a_400_and_the_connection_lives_on(two, body):
    with running_proxy(two, TOKEN) as url, requests.Session() as session:
        answer = session.post(f"{url}/v1/completions", data=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
        assert text(session.post(f"{url}/v1/completions", json={"prompt": "hi"})) == "base"
        assert len(two[0].completions() + two[1].completions()) == 1


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"lora_name": "", "lora_path": "/x"}', b'{"lora_name": 5}'])
def test_an_adapter_order_that_makes_no_sense_gets_a_400(two, path, body):
    with running_proxy(two, TOKEN) as url:
        assert requests.post(f"{url}/v1/{path}", data=body).status_code == 400


def test_bad_requests_leave_nothing_behind(two):
    with running_proxy(two, TOKEN, CLIENT_S=0.3) as url:
        threads = threading.active_count()
        cut = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 500\r\n\r\n{"
        for _ in range(5):
            raw(url, b"nonsense\r\n\r\n")
            raw(url, cut, shut=True)
            assert raw(url, cut).startswith(b"HTTP/1.1 408 ")  # open, but nothing comes any more
            sock = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            sock.sendall(cut)
            fake_vllm.reset(sock)
        wait_until(lambda: threading.active_count() <= threads)
        assert [replica["inflight"] for replica in stats(url)["replicas"]] == [0, 0]
        assert stats(url)["routed"] == 0


def test_a_large_body_that_is_refused_still_hears_why(two):
    with running_proxy(two, TOKEN, MAX_BODY=1 << 20) as url:
        answer = requests.post(f"{url}/v1/completions", data=b"x" * (32 << 20), timeout=10)
        assert answer.status_code == 413 and "at most 1048576 bytes" in answer.json()["error"]["message"]


def test_http_as_other_clients_speak_it(two):
    with running_proxy(two, TOKEN) as url:
        old = raw(url, b"GET /health HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.1 200 ") and b"Connection: close" in old
        body = json.dumps({"prompt": "hi"}).encode()
        one = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        assert raw(url, one + one + last).count(b"HTTP/1.1 200 ") == 3  # pipelined
        halves = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        halves.settimeout(5)
        head = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        halves.sendall(head)
        assert halves.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        halves.sendall(body)
        assert halves.recv(100).startswith(b"HTTP/1.1 200 ")
        halves.close()
        stream = b'{"prompt": "hi", "stream": true}'
        old = raw(url, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(stream), stream))
        assert old.endswith(b"data: [DONE]\n\n") and b"chunked" not in old


# ---- routing


def test_a_group_stays_together_and_groups_spread(two):
    with running_proxy(two, TOKEN) as url:
        for _ in range(10):
            prompt = ids(135)
            assert len({ask(url, prompt).headers["X-Replica"] for _ in range(8)}) == 1
        assert [len(fake.completions()) for fake in two] == [40, 40]
        now = stats(url)
        assert (now["routed"], now["affinity"], now["spilled"], now["unmatched"]) == (80, 70, 0, 10)
        assert now["tracked_blocks"] == 10 * 8


def test_all_eight_second_turns_go_where_their_answers_were_generated(two):
    for fake in two:
        fake.delay, fake.tokens = 0.2, 50
    with running_proxy(two, TOKEN, MAX_LEAD=1) as url:
        prompt = ids(100)
        with ThreadPoolExecutor(8) as pool:
            first = list(pool.map(lambda _: ask(url, prompt), range(8)))
        for fake in two:
            fake.delay = 0
        owners = {answer.headers["X-Replica"] for answer in first}
        assert owners == {"0", "1"}, "the group was meant to spill"
        affinity = stats(url)["affinity"]
        ask(url, prompt)
        assert stats(url)["affinity"] == affinity + 1, "eight answers have not made the prompt look common"
        for answer in first:
            said = answer.json()["choices"][0]["token_ids"]
            assert ask(url, prompt + said + ids(40)).headers["X-Replica"] == answer.headers["X-Replica"]


def test_the_prefix_is_found_at_the_replica(two):
    with running_proxy(two, TOKEN) as url:
        prompt = ids(135)
        hits = [ask(url, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(8)]
        assert hits == [0] + [128] * 7


# ---- a sync costs nothing


def test_pause_and_resume_are_not_passed_on(two):
    with running_proxy(two, TOKEN) as url:
        assert requests.post(f"{url}/pause?mode=keep").status_code == 200
        assert requests.post(f"{url}/resume").status_code == 200
        assert not [body for fake in two for body in fake.calls("/pause") + fake.calls("/resume")]


def test_a_constant_passes_pause_and_resume_on(two):
    with running_proxy(two, TOKEN, PASS_PAUSE=True) as url:
        assert requests.post(f"{url}/pause?mode=keep").json() == {"status": "paused"}
        assert [fake.paused for fake in two] == [True, True]
        assert requests.post(f"{url}/resume").status_code == 200
        assert [fake.paused for fake in two] == [False, False]


def test_the_first_load_is_answered_when_it_is_everywhere(two):
    two[1].sight["/lora/v1"] = "nothing"
    with running_proxy(two, TOKEN) as url:
        first = in_background(load, url, "v1", "/lora/v1")
        wait_until(lambda: len(two[1].calls("/v1/load_lora_adapter")) >= 3)
        assert not first.done()
        two[1].sight.clear()
        assert first.result(10).status_code == 200
        assert [fake.adapters["v1"][0] for fake in two] == ["/lora/v1"] * 2
        assert stats(url)["adapters"]["v1"]["state"] == "live"


def test_later_loads_are_accepted_at_once_and_nobody_waits_for_the_slowest_mount(two, capsys):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.sight["/lora/v2"] = "nothing"
        begin = time.monotonic()
        assert load(url, "v2", "/lora/v2").status_code == 200
        assert time.monotonic() - begin < 0.05 or load_again_is_quick(url, two)
        early = [in_background(ask, url, ids(40), "v2") for _ in range(4)]
        wait_until(lambda: stats(url)["held"] == 4)
        assert text(ask(url, ids(40), "v1")) == "weights-1"  # older policies are not delayed
        two[0].sight.clear()
        assert {text(answer.result(5)) for answer in early} == {"weights-2"}
        assert {answer.result().headers["X-Replica"] for answer in early} == {"0"}
        assert {ask(url, ids(40), "v2").headers["X-Replica"] for _ in range(6)} == {"0"}
        assert stats(url)["adapters"]["v2"]["state"] == "loading"
        two[1].sight.clear()
        wait_until(lambda: stats(url)["adapters"]["v2"]["state"] == "live")
        wait_until(lambda: {ask(url, ids(40), "v2").headers["X-Replica"] for _ in range(4)} == {"0", "1"})
        assert stats(url)["retried"] == 0
    assert "[proxy] v2 on 2/2 replicas after " in capsys.readouterr().out


def load_again_is_quick(url, fakes):
    """One slow answer may be the machine's: three more loads, the median counts."""
    took = []
    for n in (9, 10, 11):
        for fake in fakes:
            fake.sight.clear()
        wait_until(lambda: "loading" not in [adapter["state"] for adapter in stats(url)["adapters"].values()])
        begin = time.monotonic()
        load(url, f"v{n}", f"/lora/v{n}")
        took.append(time.monotonic() - begin)
    for fake in fakes:
        fake.sight["/lora/v2"] = "nothing"
    return sorted(took)[1] < 0.05


def test_offers_come_quickly_first_then_at_a_steady_interval(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = "nothing"
        begin = time.monotonic()
        load(url, "v2", "/lora/v2")
        offers = lambda: len(two[0].calls("/v1/load_lora_adapter")) - 1
        wait_until(lambda: offers() >= 3)
        assert time.monotonic() - begin < 2
        wait_until(lambda: offers() >= 6)
        assert 1.2 < time.monotonic() - begin < 5
        assert len(two[1].calls("/v1/load_lora_adapter")) == 2
        two[0].sight.clear()


def test_a_partly_visible_adapter_is_offered_again(two):
    for fake in two:
        fake.sight["/lora/v1"] = "partly"
    with running_proxy(two, TOKEN) as url:
        first = in_background(load, url, "v1", "/lora/v1")
        wait_until(lambda: all(len(fake.calls("/v1/load_lora_adapter")) >= 2 for fake in two))
        for fake in two:
            fake.sight.clear()
        assert first.result(10).status_code == 200
        assert stats(url)["adapters"]["v1"]["attempts"] >= 6
        assert stats(url)["ejected"] == 0


def test_a_second_load_waits_for_the_first(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = "nothing"
        assert load(url, "v2", "/lora/v2").status_code == 200
        third = in_background(load, url, "v3", "/lora/v3")
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) >= 4)
        assert not third.done() and "v3" not in stats(url)["adapters"]
        two[0].sight.clear()
        assert third.result(10).status_code == 200
        wait_until(lambda: all(list(fake.adapters) == ["v1", "v2", "v3"] for fake in two))


def test_a_first_load_that_nothing_can_mend_fails_at_once_and_everywhere(two):
    two[1].rank["/lora/v1"] = 8
    with running_proxy(two, TOKEN) as url:
        answer = load(url, "v1", "/lora/v1")
        message = answer.json()["error"]["message"]
        assert answer.status_code not in (200, 404)  # TRL takes a 404 for a server without runtime loading
        assert "LoRA rank 8 is greater than max_lora_rank 1." in message and f"replica 2 ({two[1].url})" in message
        assert len(two[1].calls("/v1/load_lora_adapter")) == 1
        wait_until(lambda: not two[0].adapters)
        assert "LoRA rank 8" in ask(url, ids(20), "v1").json()["error"]["message"]
        assert load(url, "v2", "/lora/v2").status_code == 200  # it had its answer: the next load is not blamed
        assert stats(url)["ejected"] == 0


def test_a_background_failure_answers_the_next_load_and_the_requests_that_name_it(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = "nothing"
        two[0].rank["/lora/v2"] = 8
        two[1].sight["/lora/v2"] = "nothing"
        assert load(url, "v2", "/lora/v2").status_code == 200
        waiting = in_background(ask, url, ids(40), "v2")
        wait_until(lambda: stats(url)["held"] == 1)
        two[0].sight.clear()
        refused = waiting.result(5)
        assert refused.status_code >= 400 and "LoRA rank 8" in refused.json()["error"]["message"]
        blamed = load(url, "v3", "/lora/v3")
        assert blamed.status_code >= 400 and "v2 on replica 1" in blamed.text and "LoRA rank 8" in blamed.text
        two[1].sight.clear()
        assert load(url, "v3", "/lora/v3").status_code == 200
        wait_until(lambda: all(list(fake.adapters) == ["v1", "v3"] for fake in two))
        assert text(ask(url, ids(40), "v1")) == "weights-1"


def test_a_load_that_nobody_sees_fails_at_the_deadline(two):
    for fake in two:
        fake.sight["/lora/v1"] = "nothing"
    with running_proxy(two, TOKEN, LOAD_DEADLINE_S=0.5) as url:
        answer = load(url, "v1", "/lora/v1")
        assert answer.status_code not in (200, 404) and "No adapter found for /lora/v1" in answer.text
        assert stats(url)["ejected"] == 0


def test_a_replica_that_alone_never_sees_the_files_is_taken_out(two):
    two[1].sight["/lora/v2"] = "nothing"
    with running_proxy(two, TOKEN, LOAD_DEADLINE_S=0.6, PROBE_S=0.1) as url:
        load(url, "v1", "/lora/v1")
        assert load(url, "v2", "/lora/v2").status_code == 200
        wait_until(lambda: stats(url)["adapters"]["v2"]["state"] == "live")
        assert stats(url)["replicas"][1]["state"] != "ready"
        assert "No adapter found" in stats(url)["replicas"][1]["reason"]
        assert {ask(url, ids(40), name).headers["X-Replica"] for name in ("v1", "v2", BASE)} == {"0"}
        two[1].sight.clear()
        wait_until(lambda: stats(url)["replicas"][1]["state"] == "ready")
        assert list(two[1].adapters) == ["v1", "v2"]


# ---- one name, one set of weights


def test_the_same_load_again_is_done_already(two):
    with running_proxy(two, TOKEN) as url:
        for _ in range(3):
            assert load(url, "v1", "/lora/v1").status_code == 200
        assert [len(fake.calls("/v1/load_lora_adapter")) for fake in two] == [1, 1]


def rebound(url, fakes, name, path, weights, prompt):
    """`name` now means the weights at `path`, everywhere and for prompts that the old ones were asked, too."""
    resets = [fake.resets for fake in fakes]
    assert load(url, name, path).status_code == 200
    wait_until(lambda: stats(url)["adapters"][name] | {"state": "live", "path": path} == stats(url)["adapters"][name])
    assert [fake.adapters[name][0] for fake in fakes] == [path, path]
    assert all(fake.resets > before for fake, before in zip(fakes, resets, strict=True))
    assert [text(requests.post(f"{fake.url}/v1/completions", json={"model": name, "prompt": prompt},
            headers={"Authorization": f"Bearer {TOKEN}"})) for fake in fakes] == [weights, weights]  # fmt: skip


def prime(fakes, name, prompt):
    """Put `prompt` into both prefix caches, under `name`."""
    for fake in fakes:
        fake.complete({"model": name, "prompt": prompt})


def test_a_name_with_another_path_is_unloaded_the_cache_reset_and_loaded_anew(two):
    with running_proxy(two, TOKEN) as url:
        prompt = ids(64)
        load(url, "v1", "/lora/v1")
        load(url, "v3", "/lora/v3")
        prime(two, "v1", prompt)
        rebound(url, two, "v1", "/lora/v2", "weights-2", prompt)
        prime(two, "v3", prompt)  # v3 was held when the cache was reset, and has filled it again
        rebound(url, two, "v3", "/lora/v4", "weights-4", prompt)


def test_a_name_that_comes_back_after_an_unload_meets_no_old_blocks(two):
    """The relaunched trainer's case: same name, same path, other weights."""
    with running_proxy(two, TOKEN) as url:
        prompt = ids(64)
        load(url, "v1", "/lora/v1")
        prime(two, "v1", prompt)
        unload(url, "v1")
        wait_until(lambda: not two[0].adapters and not two[1].adapters)
        two[0].bucket["/lora/v1"] = "weights-1-again"
        rebound(url, two, "v1", "/lora/v1", "weights-1-again", prompt)


@pytest.mark.parametrize("slots", [6, 1])
def test_a_name_is_not_bound_anew_while_a_request_runs_under_it(two, slots):
    """With one slot the old weights leave the replica at once; the request under way goes on with them, and would fill
    the prefix cache with their blocks under the new weights' name."""
    for fake in two:
        fake.config["max_loras"] = slots
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.delay = 60
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        assert load(url, "v1", "/lora/v2").status_code == 200
        fresh = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: stats(url)["held"] == 1)
        wait_until(lambda: slots > 1 or not two[0].adapters | two[1].adapters)
        assert len(two[0].calls("/v1/load_lora_adapter") + two[1].calls("/v1/load_lora_adapter")) == 2
        for fake in two:
            fake.delay = 0
        assert text(running.result(10)) == "weights-1"
        assert text(fresh.result(10)) == "weights-2"


def test_an_adapter_that_somebody_else_loaded_is_not_trusted(two):
    with running_proxy(two, TOKEN) as url:
        two[0].adapters["v1"] = ("/lora/v2", "weights-2")
        prompt = ids(64)
        prime(two[:1], "v1", prompt)
        rebound(url, [two[0], two[0]], "v1", "/lora/v1", "weights-1", prompt)


def test_what_an_earlier_trainer_left_is_cleaned_up_at_the_start(two):
    for fake in two:
        fake.adapters = {"v7": ("/lora/v7", "old"), "v8": ("/lora/v8", "old")}
        fake.paused = True
        prime([fake], "v7", ids(64))
    with running_proxy(two, TOKEN) as url:
        for fake in two:
            assert (fake.adapters, fake.cache, fake.paused, fake.resets) == ({}, {}, False, 1)
        assert ask(url, ids(20), "v7").status_code == 404


def test_a_cache_that_cannot_be_reset_keeps_the_replica_out(two):
    two[0].sick["/reset_prefix_cache"] = (200, {"success": False})
    with running_proxy(two, TOKEN, ready=False, PROBE_S=0.1) as url:
        wait_until(lambda: "/reset_prefix_cache" in stats(url)["replicas"][0]["reason"])
        two[0].sick.clear()
        wait_until(lambda: stats(url)["replicas"][0]["state"] == "ready")


def test_an_unloaded_policy_serves_its_last_requests_and_then_leaves(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        load(url, "v2", "/lora/v2")
        for fake in two:
            fake.delay = 60
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        assert unload(url, "v1").status_code == 200
        assert ask(url, ids(40), "v1").status_code == 404  # a new request gets what vLLM would say
        assert "v1" in two[0].adapters and "v1" in two[1].adapters
        for fake in two:
            fake.delay = 0
        assert text(running.result(10)) == "weights-1"
        wait_until(lambda: all(list(fake.adapters) == ["v2"] for fake in two))
        wait_until(lambda: list(stats(url)["adapters"]) == ["v2"])
        assert "does not exist" in ask(url, ids(40), "v1").json()["error"]["message"]
        assert unload(url, "v1").status_code == 200 and unload(url, "never-loaded").status_code == 200


def test_a_retired_policy_takes_no_slot_from_a_live_one(two):
    """vLLM would evict one, and could not read a retired one's files again."""
    for fake in two:
        fake.config["max_loras"] = 3
    with running_proxy(two, TOKEN) as url:
        for n in (1, 2, 3):
            load(url, f"v{n}", f"/lora/v{n}")
        for fake in two:
            fake.delay = 60
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        unload(url, "v1")
        assert list(two[0].adapters) == ["v1", "v2", "v3"]
        load(url, "v4", "/lora/v4")
        wait_until(lambda: all(list(fake.adapters) == ["v2", "v3", "v4"] for fake in two))
        for fake in two:
            fake.delay = 0
        assert text(running.result(10)) == "weights-1"


def test_a_whole_run_of_syncs_keeps_names_and_weights_together(two):
    """Ten syncs as TRL does them, with max_staleness=4, under load: no answer is made with another policy's weights."""
    stop, wrong, done = threading.Event(), [], []
    with running_proxy(two, TOKEN, RETRY_S=(0.02,)) as url:
        load(url, "v1", "/lora/v1")
        newest = [1]
        prompts = [ids(64) for _ in range(4)]

        def rollouts(worker):
            while not stop.is_set():
                version = newest[0]
                got = ask(url, prompts[worker], f"v{version}")
                done.append(got.status_code)
                if got.status_code != 200 or got.json()["choices"][0]["text"] != f"weights-{version}":
                    wrong.append((version, got.text))

        workers = [threading.Thread(target=rollouts, args=(n,)) for n in range(4)]
        for worker in workers:
            worker.start()
        for version in range(2, 11):
            for fake in two:
                fake.sight[f"/lora/v{version}"] = "partly"
            load(url, f"v{version}", f"/lora/v{version}")
            newest[0] = version
            if version > 5:
                unload(url, f"v{version - 5}")
            for fake in two:
                fake.sight.clear()
            seen = len(done)
            wait_until(lambda seen=seen: len(done) > seen + 8)
        stop.set()
        for worker in workers:
            worker.join(10)
        assert not wrong and stats(url)["retried"] == 0
        wait_until(lambda: all(list(fake.adapters) == [f"v{n}" for n in range(6, 11)] for fake in two))
        assert [fake.resets for fake in two] == [1, 1]


# ---- seen from outside


def test_stats_has_what_the_interface_promises(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        ask(url, ids(40), "v1")
        now = stats(url)
        counters = {"routed", "affinity", "spilled", "unmatched", "retried", "ejected", "readmitted", "held"}
        assert set(now) >= counters | {"replicas", "adapters", "tracked_blocks"}
        for replica in now["replicas"]:
            assert set(replica) >= {"url", "state", "inflight", "routed", "adapters"}
            assert (replica["state"], replica["adapters"], replica["inflight"]) == ("ready", ["v1"], 0)
        assert [replica["url"] for replica in now["replicas"]] == [fake.url for fake in two]
        assert sum(replica["routed"] for replica in now["replicas"]) == now["routed"] == 1
        adapter = now["adapters"]["v1"]
        assert (adapter["path"], adapter["state"], adapter["attempts"]) == ("/lora/v1", "live", 2)
        assert 0 < adapter["seconds"] < 10


def test_metrics_are_valid_for_prometheus_and_agree_with_stats(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        for _ in range(5):
            ask(url, ids(40), "v1")
        answer = requests.get(f"{url}/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        now = stats(url)
        for name in ("routed", "affinity", "spilled", "unmatched", "retried", "ejected", "readmitted", "held"):
            family = families[f"lora_proxy_{name}"]
            assert family.type == "counter" and family.samples[0].value == now[name]
        by_replica = {s.labels["replica"]: s.value for s in families["lora_proxy_replica_routed"].samples}
        assert by_replica == {str(i): replica["routed"] for i, replica in enumerate(now["replicas"])}
        assert families["lora_proxy_tracked_blocks"].samples[0].value == now["tracked_blocks"]


def test_one_summary_line_an_interval_and_never_a_line_a_request(two, capsys):
    with running_proxy(two, TOKEN, REPORT_S=0.2) as url:
        threading.Thread(target=url.fleet.report, daemon=True).start()
        seen = ""

        def summary():
            nonlocal seen
            seen += capsys.readouterr().out
            return "3 routed" in seen

        for _ in range(3):
            ask(url, ids(40))
        wait_until(summary)
        for _ in range(200):
            requests.get(f"{url}/health")
        seen += capsys.readouterr().out
        assert "2/2 in service, 0 in flight" in seen
        assert len(seen.splitlines()) < 20 and all(line.startswith("[proxy] ") for line in seen.splitlines())


def test_the_token_goes_to_the_replicas_and_nowhere_else(two, capfd):
    """Not into the log, an answer or /stats, not even when a server echoes it, and never to another host."""
    with FakeVLLM() as elsewhere, running_proxy(two, TOKEN, PROBE_S=0.1) as url:
        for fake in two:
            fake.elsewhere = f"{elsewhere.url}/v1/completions"
            fake.mode = "redirect"
        waiting = in_background(ask, url, ids(40))
        wait_until(lambda: stats(url)["ejected"] >= 1)
        for fake in two:
            fake.mode = ""
        assert waiting.result(10).status_code == 200
        assert not elsewhere.log
        echo = {"error": f"bad header Authorization: Bearer {TOKEN}"}
        for fake in two:
            fake.sick = dict.fromkeys(("/v1/load_lora_adapter", "/sleep", "/v1/other", "/health"), (500, echo))
        shown = [
            load(url, "v1", "/lora/v1") if False else requests.post(f"{url}/sleep"),
            requests.post(f"{url}/v1/other"),
        ]
        wait_until(lambda: "bad header" in json.dumps(stats(url)))
        shown += [requests.get(f"{url}/stats"), requests.get(f"{url}/health"), requests.get(f"{url}/metrics")]
        assert not [answer.text for answer in shown if TOKEN in answer.text]
    output = capfd.readouterr()
    assert "bad header" in output.out and TOKEN not in output.out + output.err


def test_a_redirected_control_call_is_not_followed():
    with FakeVLLM() as elsewhere, FakeVLLM() as fake:
        fake.sick["/server_info"] = (307, "", {"Location": f"{elsewhere.url}/server_info"})
        with running_proxy([fake], TOKEN, ready=False) as url:
            wait_until(lambda: "/server_info?config_format=json answers 307" in stats(url)["replicas"][0]["reason"])
        assert not elsewhere.log


@pytest.fixture
def program(two, tmp_path):
    """proxy.py as its users start it: (its process, its environment, its log, its port)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {**os.environ, "REPLICA_URLS": f"{two[0].url}, {two[1].url}/", "HF_TOKEN": TOKEN, "PROXY_PORT": str(port)}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, PROXY], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: log.read_text().count("in service") == 2)
        yield process, env, log, port
    finally:
        process.kill()
        process.wait()


def test_the_program_itself(program):
    process, env, log, port = program
    url = f"http://127.0.0.1:{port}"
    assert requests.get(f"{url}/health").status_code == 200
    assert text(ask(url, ids(20))) == "base"
    second = subprocess.run([sys.executable, PROXY], check=False, env=env, capture_output=True, text=True, timeout=20)
    assert second.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert TOKEN not in log.read_text() and all(line.startswith("[proxy] ") for line in log.read_text().splitlines())


def test_more_connections_than_files_may_be_open_wait_until_others_close(program):
    process, _, log, port = program
    limit = len(os.listdir(f"/proc/{process.pid}/fd")) + proxy.ACCEPTORS + 20  # one that waits has its file already
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    open_ones = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]  # more than it has acceptors
    wait_until(lambda: "Too many open files" in log.read_text())  # the health checks, too
    for connection in open_ones:
        connection.close()
    wait_until(lambda: requests.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200)
    for _ in range(100):
        assert stats(f"http://127.0.0.1:{port}")
    assert "Traceback" not in log.read_text()


def test_without_threads_for_more_connections_it_serves_on(two, monkeypatch):
    with running_proxy(two, TOKEN) as url:
        start = threading.Thread.start

        def refuse_acceptors(thread):
            if thread._target and thread._target.__name__ == "serve":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse_acceptors)
        for _ in range(2 * proxy.ACCEPTORS):
            assert requests.get(f"{url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize(("urls", "message"), [("", "REPLICA_URLS is empty"), ("localhost:8000", "http(s)://host")])
def test_a_wrong_environment_is_said_at_once(urls, message):
    env = {**os.environ, "REPLICA_URLS": urls, "PROXY_PORT": "0"}
    program = subprocess.run([sys.executable, PROXY], check=False, env=env, capture_output=True, text=True, timeout=20)
    assert program.returncode == 1 and message in program.stderr


# ---- the real clients


def test_trls_own_client(two):
    accelerate = pytest.importorskip("accelerate")
    accelerate.PartialState()  # its logger wants one
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("TRL is not installed")
    file = Path(trl.origin).parent / "experimental/async_grpo/vllm_client.py"  # alone: its package imports vLLM
    spec = importlib.util.spec_from_file_location("vllm_client", file)
    vllm_client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vllm_client)
    with running_proxy(two, TOKEN) as url:
        client = vllm_client.VLLMClient(url, server_timeout=10)
        client.wait_for_server_ready()
        assert (client.get_max_model_len(), client.get_dtype(), client.get_world_size()) == (4096, "torch.bfloat16", 1)
        assert client.get_server_info()["lora_config"]["max_loras"] == 6
        for version in range(1, 9):
            client.pause()
            client.load_lora_adapter(f"v{version}", f"/lora/v{version}")
            client.resume()
            if version > 5:
                client.unload_lora_adapter(f"v{version - 5}")
        wait_until(lambda: all(list(fake.adapters) == [f"v{n}" for n in range(4, 9)] for fake in two))
        two[0].rank["/lora/v9"] = 8
        client.load_lora_adapter("v9", "/lora/v9")
        wait_until(lambda: stats(url)["adapters"]["v9"]["state"] == "failed")
        with pytest.raises(Exception, match="LoRA rank 8 is greater than max_lora_rank 1"):
            client.load_lora_adapter("v10", "/lora/v10")


def test_sixty_four_aiohttp_connections_as_the_rollout_worker_has_them(two):
    async def rollouts(url):
        limit, answers = aiohttp.TCPConnector(limit=64), []
        async with aiohttp.ClientSession(connector=limit) as session:

            async def one(prompt):
                body = {"model": "v1", "prompt": prompt, "max_tokens": 8, "n": 1, "return_token_ids": True}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    answers.append((await response.json())["choices"][0])

            await asyncio.gather(*(one(prompt) for prompt in [ids(135) for _ in range(64)] for _ in range(8)))
        return answers

    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        answers = asyncio.run(rollouts(url))
        assert len(answers) == 512 and {answer["text"] for answer in answers} == {"weights-1"}
        now = stats(url)
        assert now["routed"] == 512 and now["retried"] == now["ejected"] == 0
        wait_until(lambda: sum(replica["inflight"] for replica in stats(url)["replicas"]) == 0)
