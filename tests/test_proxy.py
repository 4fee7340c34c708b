"""proxy.py in front of fake replicas: what passes through, where it goes, what a weight sync costs,
what one name means, and what is seen from outside. All through HTTP, /stats and the log."""

import asyncio
import importlib.util
import os
import random
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import fake_vllm
import pytest
import requests
from fake_vllm import BASE, FakeVLLM, running_proxy, wait_until

import proxy

PROXY = Path(__file__).resolve().parent.parent / "proxy.py"
RANDOM = random.Random(0)
TOKEN = "hf_secretsecret"
RETRY = {"RETRY_S": 0.02}


def ids(count):
    return [RANDOM.randrange(150_000) for _ in range(count)]


def ask(url, prompt, model=BASE, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "n": 1, "logprobs": 0}
    body |= {"return_token_ids": True, **fields}
    return requests.post(f"{url}/v1/completions", json=body, timeout=30)


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def load(url, name, path):
    order = {"lora_name": name, "lora_path": path}
    return requests.post(f"{url}/v1/load_lora_adapter", json=order, timeout=30)


def unload(url, name):
    return requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=30)


def stats(url):
    return requests.get(f"{url}/stats", timeout=30).json()


def states(url):
    return [replica["state"] for replica in stats(url)["replicas"]]


def reason(url, index=0):
    return stats(url)["replicas"][index]["reason"]


def inflight(url):
    return [replica["inflight"] for replica in stats(url)["replicas"]]


def where(answer, fakes):
    """Number of the replica that answered."""
    return [fake.url for fake in fakes].index(answer.headers["X-Replica"])


def live(url, name):
    wait_until(lambda: stats(url)["adapters"][name]["state"] == "live")


def in_background(call, *args, **kwargs):
    """A future of `call`, in a thread that does not outlive the test by much."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **kwargs)
    pool.shutdown(wait=False)
    return future


def connect(url):
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)


def raw(url, data):
    """Send bytes, return all that comes back until the proxy closes."""
    with connect(url) as sock:
        sock.sendall(data)
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
        sent = {"model": BASE, "prompt": prompt, "max_tokens": 64, "n": 1, "logprobs": 0}
        assert two[where(answer, two)].completions() == [sent | {"return_token_ids": True}]
        assert len(two[0].completions() + two[1].completions()) == 1


def test_questions_get_one_replicas_answer(two):
    with running_proxy(two, TOKEN) as url:
        assert requests.get(f"{url}/v1/models").json()["data"][0]["id"] == BASE
        info = requests.get(f"{url}/server_info", params={"config_format": "json"}).json()
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
        assert requests.get(f"{url}/get_world_size").json() == {"world_size": 1}
        assert requests.get(f"{url}/no/such/path").status_code == 404
        assert len(two[0].calls("/get_world_size") + two[1].calls("/get_world_size")) == 1


def test_a_question_that_a_replica_answers_with_an_error_is_no_doubt_about_it(two):
    for fake in two:
        fake.sick["/get_world_size"] = (500, "not implemented")
    with running_proxy(two, TOKEN) as url:
        assert requests.get(f"{url}/get_world_size").status_code == 500
        assert states(url) == ["ready", "ready"] and "doubted" not in url.said


def test_what_changes_a_servers_state_goes_to_all_replicas_and_the_worst_answer_counts(two):
    with running_proxy(two, TOKEN) as url:
        before = [fake.resets for fake in two]
        answer = requests.post(f"{url}/reset_prefix_cache?reset_running_requests=true")
        assert answer.json() == {"success": True}
        assert [fake.resets for fake in two] == [count + 1 for count in before]
        for path in ("/sleep?level=1", "/wake_up", "/collective_rpc", "/update_weights"):
            requests.post(url + path, json={"method": "x"})
            assert [len(fake.calls(path.partition("?")[0])) for fake in two] == [1, 1]
        two[0].sick["/sleep"] = (500, "no")
        assert requests.post(f"{url}/sleep").text == "no"
        assert [len(fake.calls("/sleep")) for fake in two] == [2, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1+1="}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/inference/v1/generate", {"token_ids": list(range(40))}),  # vLLM's token-in, token-out
    ],
)
def test_a_generation_is_made_once_whatever_its_route(two, path, body):
    with running_proxy(two, TOKEN) as url:
        first = requests.post(url + path, json=body)
        assert text(first) == "base"
        assert len(two[0].completions() + two[1].completions()) == 1
        if "token_ids" in body:  # ids are routed by their prefix
            assert where(requests.post(url + path, json=body), two) == where(first, two)
            assert stats(url)["affinity"] == 1


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("interim", [False, True])
def test_answers_arrive_intact_however_they_are_framed(two, chunked, interim):
    with running_proxy(two, TOKEN) as url, requests.Session() as session:
        for fake in two:
            fake.chunked, fake.interim, fake.tokens = chunked, interim, 500
        for _ in range(3):
            body = {"model": BASE, "prompt": ids(20)}
            answer = session.post(f"{url}/v1/completions", json=body)
            tokens = answer.json()["choices"][0]["token_ids"]
            assert len(tokens) == 500 and tokens == list(range(tokens[0], tokens[0] + 500))
        assert "doubted" not in url.said


def test_a_stream_is_passed_on_when_it_is_whole(two):
    with running_proxy(two, TOKEN) as url:
        body = {"prompt": ids(20), "stream": True}
        answer = requests.post(f"{url}/v1/completions", json=body)
        events = answer.text.split("\n\n")
        assert events[0].startswith('data: {"id"') and events[-2:] == ["data: [DONE]", ""]
        assert answer.headers["Content-Type"].startswith("text/event-stream")


def test_replicas_over_https_with_a_certificate_of_ones_own(tmp_path, monkeypatch):
    """The way to Jobs. A TLS 1.3 server sends tickets after the handshake, which are no answer."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    command += f" -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with FakeVLLM(TOKEN, tls=tls) as fake:
        with running_proxy([fake], TOKEN, ready=False) as url:
            wait_until(lambda: "self-signed certificate" in reason(url))
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with running_proxy([fake], TOKEN) as url:
            fake.tokens = 5000
            for _ in range(3):
                assert text(ask(url, ids(2000), max_tokens=5000)) == "base"
            assert stats(url)["retried"] == 0
            fake.mode = "hang"
            with pytest.raises(requests.Timeout):
                requests.post(f"{url}/v1/completions", json={"prompt": "hi"}, timeout=0.3)
            wait_until(lambda: fake.active == 0)
            assert fake.aborted == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 this is not http\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 16\r\nContent-Length: 17\r\n\r\n" + b'{"prompt": "hi"}',
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_not_a_request_reaches_no_replica_and_the_connection_is_closed(two, data):
    with running_proxy(two, TOKEN) as url:
        assert b"HTTP/1.1 2" not in raw(url, data)
        assert not two[0].completions() + two[1].completions()
        assert text(ask(url, ids(20))) == "base"


@pytest.mark.parametrize("method", ["HEAD", "DELETE", "PUT"])
def test_other_methods_get_a_405_and_do_no_harm_to_the_next_request(two, method):
    with running_proxy(two, TOKEN) as url, requests.Session() as session:
        assert session.request(method, f"{url}/v1/models", timeout=30).status_code == 405
        assert session.get(f"{url}/v1/models", timeout=30).json()["data"]


def test_pipelined_and_interrupted_requests(two):
    """Two requests in one packet get two answers; a body that never comes keeps nobody."""
    body = b'{"prompt": "hi"}'
    one = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    with running_proxy(two, TOKEN) as url:
        assert raw(url, one + one + last).count(b"HTTP/1.1 200 ") == 3
        for _ in range(5):
            sock = connect(url)
            sock.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
            fake_vllm.reset(sock)
        assert text(ask(url, ids(20))) == "base"
        assert inflight(url) == [0, 0] and stats(url)["routed"] == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{not json",
        b"[" * 100_000,
        b"[1, 2]",
        b"{}",
        b'{"prompt": 5}',
        b'{"prompt": {"a": 1}}',
        b"\xff\xfe",
    ],
)
def test_a_completion_that_makes_no_sense_is_vllms_to_refuse_and_the_connection_lives_on(two, body):
    with running_proxy(two, TOKEN) as url, requests.Session() as session:
        answer = session.post(f"{url}/v1/completions", data=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "This is the client's own mistake"
        assert text(session.post(f"{url}/v1/completions", json={"prompt": "hi"})) == "base"
        assert stats(url)["retried"] == 0


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"lora_name": "", "lora_path": "/x"}', b'{"lora_name": 5}']
)
def test_a_load_that_makes_no_sense_gets_a_400(two, body):
    with running_proxy(two, TOKEN) as url:
        answer = requests.post(f"{url}/v1/load_lora_adapter", data=body)
        assert answer.status_code == 400 and "lora_path" in answer.json()["error"]["message"]


# ---- routing


def test_a_group_stays_together_and_groups_spread(two):
    with running_proxy(two, TOKEN) as url:
        for _ in range(10):
            prompt = ids(135)
            answers = [ask(url, prompt) for _ in range(8)]
            assert len({where(answer, two) for answer in answers}) == 1
            found = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
            assert found == [0] + [128] * 7
        assert [len(fake.completions()) for fake in two] == [40, 40]
        now = stats(url)
        assert (now["routed"], now["affinity"], now["spilled"], now["unmatched"]) == (80, 70, 0, 10)


def test_second_turns_go_where_their_prompt_is(two):
    """At least 95 %; when nothing is overloaded, all of them."""
    with running_proxy(two, TOKEN) as url:
        for _ in range(5):
            prompt = ids(100)
            home = where(ask(url, prompt), two)
            turns = [prompt + ids(80) for _ in range(8)]
            assert {where(ask(url, turn), two) for turn in turns} == {home}
        now = stats(url)
        assert (now["affinity"], now["unmatched"]) == (40, 5)


def test_a_replica_that_is_far_ahead_gets_no_more_of_its_prefix(two):
    with running_proxy(two, TOKEN, MAX_LEAD=1) as url:
        prompt = ids(100)
        for fake in two:
            fake.delay = 60
        answers = [in_background(ask, url, prompt) for _ in range(8)]
        wait_until(lambda: two[0].active == two[1].active == 4)
        for fake in two:
            fake.delay = 0
        assert {text(answer.result(30)) for answer in answers} == {"base"}
        assert stats(url)["spilled"] >= 1


# ---- a sync costs nothing


def test_pause_and_resume_are_not_passed_on(two):
    with running_proxy(two, TOKEN) as url:
        calls = [len(fake.calls("/resume")) for fake in two]
        assert requests.post(f"{url}/pause?mode=keep").status_code == 200
        assert requests.post(f"{url}/resume").status_code == 200
        assert not two[0].calls("/pause") + two[1].calls("/pause")
        assert [len(fake.calls("/resume")) for fake in two] == calls


def test_the_first_load_is_answered_when_it_is_everywhere(two):
    two[1].sight["/lora/v1"] = "nothing"
    with running_proxy(two, TOKEN, **RETRY) as url:
        first = in_background(load, url, "v1", "/lora/v1")
        wait_until(lambda: len(two[1].calls("/v1/load_lora_adapter")) >= 3)
        assert not first.done()
        two[1].sight.clear()
        assert first.result(30).status_code == 200
        assert [fake.adapters["v1"][0] for fake in two] == ["/lora/v1"] * 2
        assert stats(url)["adapters"]["v1"]["state"] == "live"


def test_later_loads_are_accepted_at_once_and_nobody_waits_for_the_slowest_mount(two):
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.sight["/lora/v2"] = "nothing"
        assert load(url, "v2", "/lora/v2").status_code == 200  # and no replica has seen it
        early = [in_background(ask, url, ids(40), "v2") for _ in range(4)]
        wait_until(lambda: stats(url)["held"] == 4)
        assert text(ask(url, ids(40), "v1")) == "weights-1"  # older policies are not delayed
        two[0].sight.clear()
        assert {text(answer.result(5)) for answer in early} == {"weights-2"}
        assert {where(answer.result(), two) for answer in early} == {0}
        assert {where(ask(url, ids(40), "v2"), two) for _ in range(6)} == {0}
        assert stats(url)["adapters"]["v2"]["state"] == "loading"
        two[1].sight.clear()
        live(url, "v2")
        assert {where(ask(url, ids(40), "v2"), two) for _ in range(4)} == {0, 1}
        assert stats(url)["retried"] == 0
        assert "[proxy] v2 on 2/2 replicas after " in url.said


def test_a_load_is_offered_again_at_a_steady_interval_to_the_replica_that_lags(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = "nothing"
        begin = time.monotonic()
        load(url, "v2", "/lora/v2")
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) == 1 + 4)
        assert time.monotonic() - begin > 3 * 0.5
        assert len(two[1].calls("/v1/load_lora_adapter")) == 1 + 1
        two[0].sight.clear()


def test_a_second_load_waits_for_the_first(two):
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = "nothing"
        assert load(url, "v2", "/lora/v2").status_code == 200
        third = in_background(load, url, "v3", "/lora/v3")
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) >= 4)
        assert not third.done() and "v3" not in stats(url)["adapters"]
        two[0].sight.clear()
        assert third.result(30).status_code == 200
        wait_until(lambda: all(list(fake.adapters) == ["v1", "v2", "v3"] for fake in two))


# ---- a refused load: later, never, or this replica's fault


LATER = [
    (404, {"error": {"message": "Loading lora v2 failed: No adapter found for /lora/v2"}}),
    (500, {"error": {"message": "Call to add_lora method failed: Error while deserializing"}}),
    (408, "request timeout"),
    (425, "too early"),
    (429, "too many requests"),
    (502, "bad gateway"),
    (503, "no upstream"),
    (504, "gateway timeout"),
]


@pytest.mark.parametrize("answer", LATER)
def test_a_load_that_cannot_work_yet_is_offered_again(two, answer):
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        two[0].sick["/v1/load_lora_adapter"] = answer
        assert load(url, "v2", "/lora/v2").status_code == 200
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) >= 4)
        assert states(url) == ["ready", "ready"]
        two[0].sick.clear()
        live(url, "v2")
        assert load(url, "v3", "/lora/v3").status_code == 200
        assert stats(url)["ejected"] == 0


NEVER = [
    (500, {"error": {"message": "Call to add_lora method failed: LoRA rank 8 > max_lora_rank 1"}}),
    (500, {"error": {"message": "Call to add_lora method failed: expected target modules in"}}),
    (400, {"error": {"message": "this adapter makes no sense"}}),
]


@pytest.mark.parametrize("answer", NEVER)
def test_a_first_load_that_nothing_can_mend_fails_at_once_and_everywhere(two, answer):
    two[1].sick["/v1/load_lora_adapter"] = answer
    with running_proxy(two, TOKEN) as url:
        refused = load(url, "v1", "/lora/v1")
        message = refused.json()["error"]["message"]
        # TRL takes a 404 for a server without runtime loading
        assert refused.status_code == 424 and answer[1]["error"]["message"] in message
        assert two[1].url in message
        assert len(two[1].calls("/v1/load_lora_adapter")) == 1
        wait_until(lambda: not two[0].adapters)
        assert ask(url, ids(20), "v1").json()["error"]["message"] == message
        two[1].sick.clear()
        assert load(url, "v2", "/lora/v2").status_code == 200  # it is not blamed for the first
        assert states(url) == ["ready", "ready"]


FAULT = [
    (401, "Unauthorized"),
    (403, "Forbidden"),
    (404, "this is another server's page"),
    (404, {"detail": "Not Found"}),
    (500, "EngineCore encountered an issue."),
]


@pytest.mark.parametrize("answer", FAULT)
def test_a_replica_at_fault_for_a_load_is_out_and_the_load_goes_on(two, answer):
    with running_proxy(two, TOKEN, PROBE_S=0.05, **RETRY) as url:
        two[0].sick["/v1/load_lora_adapter"] = answer
        assert load(url, "v1", "/lora/v1").status_code == 200
        wait_until(lambda: states(url)[0] == "joining")  # it is healthy, but has not got v1
        assert f": {answer[0]} " in reason(url)
        assert where(ask(url, ids(40)), two) == 1
        two[0].sick.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v1"]


def test_a_server_without_runtime_loading_is_told_what_is_missing(two):
    with running_proxy(two, TOKEN) as url:
        two[0].sick["/v1/load_lora_adapter"] = (404, {"detail": "Not Found"})
        load(url, "v1", "/lora/v1")
        wait_until(lambda: "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in url.said)


def test_a_background_failure_answers_the_next_load_and_the_requests_that_name_it(two):
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.sight["/lora/v2"] = "nothing"
        two[0].rank["/lora/v2"] = 8
        assert load(url, "v2", "/lora/v2").status_code == 200
        waiting = in_background(ask, url, ids(40), "v2")
        wait_until(lambda: stats(url)["held"] == 1)
        two[0].sight.clear()
        for refused in (waiting.result(5), load(url, "v3", "/lora/v3")):
            assert refused.status_code == 424 and f"v2 on {two[0].url}" in refused.text
            assert "LoRA rank 8 is greater than max_lora_rank 1" in refused.text
        two[1].sight.clear()
        assert load(url, "v3", "/lora/v3").status_code == 200
        wait_until(lambda: all(list(fake.adapters) == ["v1", "v3"] for fake in two))
        assert text(ask(url, ids(40), "v1")) == "weights-1"


def test_a_load_that_nobody_sees_fails_at_the_deadline(two):
    for fake in two:
        fake.sight["/lora/v1"] = "nothing"
    with running_proxy(two, TOKEN, LOAD_DEADLINE_S=0.5, **RETRY) as url:
        answer = load(url, "v1", "/lora/v1")
        assert answer.status_code == 424 and "No adapter found for /lora/v1" in answer.text
        assert states(url) == ["ready", "ready"]


def test_a_replica_that_alone_never_sees_the_files_is_taken_out(two):
    two[1].sight["/lora/v2"] = "nothing"
    with running_proxy(two, TOKEN, LOAD_DEADLINE_S=0.6, PROBE_S=0.1, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        assert load(url, "v2", "/lora/v2").status_code == 200
        live(url, "v2")
        assert states(url)[1] != "ready" and "No adapter found" in reason(url, 1)
        assert {where(ask(url, ids(40), name), two) for name in ("v1", "v2", BASE)} == {0}
        two[1].sight.clear()
        wait_until(lambda: states(url)[1] == "ready")
        assert list(two[1].adapters) == ["v1", "v2"]


# ---- one name, one set of weights


def test_the_same_load_again_is_done_already(two):
    with running_proxy(two, TOKEN) as url:
        for _ in range(3):
            assert load(url, "v1", "/lora/v1").status_code == 200
        assert [len(fake.calls("/v1/load_lora_adapter")) for fake in two] == [1, 1]


def test_a_used_name_with_another_path_is_refused(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        for _ in range(2):
            refused = load(url, "v1", "/lora/v2")
            assert refused.status_code == 409
            assert "v1 is /lora/v1" in refused.text and "names never repeat" in refused.text
            assert text(ask(url, ids(64), "v1")) == "weights-1"
        unload(url, "v1")
        # what is at the same path may have changed meanwhile
        assert {load(url, "v1", f"/lora/v{n}").status_code for n in (1, 2)} == {409}


def test_an_adapter_that_somebody_else_loaded_is_not_trusted(two):
    """Neither its weights nor the blocks that were computed with them."""
    with running_proxy(two, TOKEN, PROBE_S=0.05) as url:
        two[0].adapters["v1"] = ("/lora/v2", "weights-2")
        prompt = ids(64)
        two[0].complete({"model": "v1", "prompt": prompt})
        assert load(url, "v1", "/lora/v1").status_code == 200
        wait_until(lambda: two[0].adapters == {"v1": ("/lora/v1", "weights-1")})
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert two[0].complete({"model": "v1", "prompt": prompt})[1]["choices"][0]["text"] == (
            "weights-1"
        )


def test_what_an_earlier_trainer_left_is_cleaned_up_at_the_start(two):
    for fake in two:
        fake.adapters = {"v7": ("/lora/v7", "old"), "v8": ("/lora/v8", "old")}
        fake.paused = True
        fake.complete({"model": "v7", "prompt": ids(64)})
    with running_proxy(two, TOKEN) as url:
        for fake in two:
            assert (fake.adapters, fake.paused, fake.resets) == ({}, False, 1)
            assert not [name for name, _ in fake.cache if name != BASE]
        assert ask(url, ids(20), "v7").status_code == 404


def test_a_cache_that_cannot_be_reset_keeps_the_replica_out(two):
    two[0].sick["/reset_prefix_cache"] = (200, {"success": False})
    with running_proxy(two, TOKEN, ready=False, PROBE_S=0.1) as url:
        wait_until(lambda: "/reset_prefix_cache" in reason(url))
        two[0].sick.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])


# ---- unload means unload


def test_an_unloaded_policy_leaves_and_its_running_requests_end_as_vllm_ends_them(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        load(url, "v2", "/lora/v2")
        for fake in two:
            fake.delay = 60
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        assert unload(url, "v1").status_code == 200
        wait_until(lambda: all(list(fake.adapters) == ["v2"] for fake in two))
        for fake in two:
            fake.delay = 0
        assert text(running.result(30)) == "weights-1"
        assert list(stats(url)["adapters"]) == ["v2"] and stats(url)["retried"] == 0
        assert {unload(url, name).status_code for name in ("v1", "never-loaded")} == {200}


def test_a_late_request_for_an_unloaded_policy_is_answered_as_an_aborted_one(two):
    """An error would make TRL repeat it 90 times and then stop. One token, because TRL's parser
    raises on an empty completion."""
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        unload(url, "v1")
        prompt = ids(40)
        answer = ask(url, prompt, "v1")
        choice = answer.json()["choices"][0]
        assert answer.status_code == 200 and choice["finish_reason"] == "abort"
        assert choice["token_ids"] == prompt[-1:]
        assert choice["logprobs"]["token_logprobs"] == [0.0]
        assert ask(url, "as text", "v1").json()["choices"][0]["token_ids"] == [0]
        chat = {"model": "v1", "messages": [{"role": "user", "content": "hi"}]}
        assert requests.post(f"{url}/v1/chat/completions", json=chat).status_code == 404
        assert not two[0].completions() + two[1].completions()
        assert states(url) == ["ready", "ready"]


def test_a_request_that_waits_for_a_policy_that_is_unloaded_ends_as_an_aborted_one(two):
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.sight["/lora/v2"] = "nothing"
        load(url, "v2", "/lora/v2")
        waiting = in_background(ask, url, ids(40), "v2")
        wait_until(lambda: stats(url)["held"] == 1)
        unload(url, "v2")
        assert waiting.result(30).json()["choices"][0]["finish_reason"] == "abort"
        assert load(url, "v3", "/lora/v3").status_code == 200


def test_a_whole_run_of_syncs_keeps_names_and_weights_together(two):
    """Ten syncs as TRL does them, with max_staleness=4, under load."""
    stop, wrong, done = threading.Event(), [], []
    with running_proxy(two, TOKEN, **RETRY) as url:
        load(url, "v1", "/lora/v1")
        newest = [1]
        prompts = [ids(64) for _ in range(4)]

        def rollouts(worker):
            while not stop.is_set():
                version = newest[0]
                got = ask(url, prompts[worker], f"v{version}")
                done.append(got.status_code)
                if got.status_code != 200 or text(got) != f"weights-{version}":
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
            worker.join(30)
        assert not wrong and stats(url)["retried"] == 0
        newest = [f"v{n}" for n in range(6, 11)]
        wait_until(lambda: all(list(fake.adapters) == newest for fake in two))
        assert [fake.resets for fake in two] == [1, 1]


# ---- seen from outside


def test_stats_has_what_the_interface_promises(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        ask(url, ids(40), "v1")
        now = stats(url)
        counts = "routed affinity spilled unmatched retried ejected readmitted held".split()
        assert [now[name] for name in counts] == [1, 0, 0, 1, 0, 0, 0, 0]
        for replica in now["replicas"]:
            assert set(replica) >= {"url", "state", "inflight", "routed", "adapters"}
            seen = replica["state"], replica["adapters"], replica["inflight"]
            assert seen == ("ready", ["v1"], 0)
        assert [replica["url"] for replica in now["replicas"]] == [fake.url for fake in two]
        assert sum(replica["routed"] for replica in now["replicas"]) == 1
        adapter = now["adapters"]["v1"]
        assert (adapter["path"], adapter["state"], adapter["tries"]) == ("/lora/v1", "live", 2)


def test_a_line_per_event_and_never_one_per_request(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        for _ in range(50):
            ask(url, ids(40), "v1")
            requests.get(f"{url}/health")
        lines = url.said.splitlines()
        assert all(line.startswith("[proxy] ") for line in lines)
        assert len([line for line in lines if "in service with 0 adapters" in line]) == 2
        assert len(lines) == 1 + 2 + 1  # its start, two replicas, one adapter


def test_the_token_goes_to_the_replicas_and_nowhere_else(two):
    """Not into the log, an answer or /stats, not even when a server echoes it, and never to another
    host. (running_proxy looks at the log of each test.)"""
    with FakeVLLM() as elsewhere, running_proxy(two, TOKEN, PROBE_S=0.1) as url:
        for fake in two:
            fake.elsewhere, fake.mode = f"{elsewhere.url}/v1/completions", "redirect"
        waiting = in_background(ask, url, ids(40))
        wait_until(lambda: stats(url)["retried"] >= 1)
        for fake in two:
            fake.mode = ""
        assert waiting.result(30).status_code == 200
        echo = {"error": f"bad header Authorization: Bearer {TOKEN}"}
        for fake in two:
            fake.sick = dict.fromkeys(("/sleep", "/v1/other"), (403, echo))
        shown = [requests.post(f"{url}/sleep"), requests.post(f"{url}/v1/other")]
        assert all("bad header" in answer.text for answer in shown)
        for fake in two:  # from now on they are out, and nobody answers requests
            fake.sick = dict.fromkeys(("/health", "/v1/models"), (403, echo))
        wait_until(lambda: "bad header" in reason(url) and "bad header" in url.said)
        shown += [requests.get(f"{url}/stats"), requests.get(f"{url}/health")]
        assert not [answer.text for answer in shown if TOKEN in answer.text]
        assert not elsewhere.log


@pytest.mark.parametrize(
    ("host", "key", "sent"),
    [
        ("127.0.0.1", "", f"Bearer {TOKEN}"),  # the local stand-in
        ("127.0.0.1", "sk-own", "Bearer sk-own"),
        ("localhost", "", None),
        ("localhost", "sk-own", "Bearer sk-own"),
    ],
)
def test_the_token_goes_to_no_host_but_hugging_faces(monkeypatch, host, key, sent):
    with FakeVLLM() as fake:
        replica = fake.url.replace("127.0.0.1", host)
        with running_proxy([replica], TOKEN, api_key=key) as url:
            headers = requests.get(f"{url}/echo").json()["headers"]
            assert headers["Host"] == replica.partition("//")[2]
            assert fake.keys == {sent}


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://a1--8000.hf.jobs", TOKEN),
        ("http://a1--8000.hf.jobs", "sk-own"),  # in clear text
        ("https://a1--8000.nothf.jobs", "sk-own"),
        ("https://hf.jobs.example.org", "sk-own"),
        ("http://10.0.0.11:8000", "sk-own"),
    ],
)
def test_only_hugging_faces_jobs_get_the_token(url, key):
    """No test can be such a host, so this one asks the class."""
    assert proxy.Replica(url, TOKEN, "sk-own").key == key


def test_a_redirected_control_call_is_not_followed():
    with FakeVLLM() as elsewhere, FakeVLLM() as fake:
        fake.sick["/server_info"] = (307, "", {"Location": f"{elsewhere.url}/server_info"})
        with running_proxy([fake], TOKEN, ready=False) as url:
            wait_until(lambda: "/server_info?config_format=json: 307" in reason(url))
        assert not elsewhere.log


def test_more_connections_than_files_may_be_open_wait_until_others_close(two):
    with running_proxy(two, TOKEN, PROBE_S=0.1) as url:
        files = len(os.listdir(f"/proc/{url.process.pid}/fd")) + 20
        resource.prlimit(url.process.pid, resource.RLIMIT_NOFILE, (files, files))
        held = [connect(url) for _ in range(100)]
        wait_until(lambda: "Too many open files" in url.said)  # the health checks cannot connect
        for connection in held:
            connection.close()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert text(ask(url, ids(20))) == "base"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"REPLICA_URLS": ""}, "REPLICA_URLS= "),
        ({"REPLICA_URLS": "localhost:8000"}, "http(s)://host"),
        ({"PROXY_PORT": "{busy}"}, "Address already in use"),
        ({"PROXY_PORT": "eighty"}, "eighty"),
    ],
)
def test_a_wrong_environment_is_said_at_once(environment, message):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        env = {"REPLICA_URLS": "http://127.0.0.1:9", "PROXY_PORT": "0", **environment}
        port = str(busy.getsockname()[1])
        env = {name: value.replace("{busy}", port) for name, value in env.items()}
        command = [sys.executable, PROXY]
        env = {**os.environ, **env, "HF_TOKEN": TOKEN}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.count("\n") == 1 and TOKEN not in done.stderr


# ---- the real clients


def test_trls_own_client(two):
    accelerate = pytest.importorskip("accelerate")
    accelerate.PartialState()  # its logger wants one
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("TRL is not installed")
    # alone, because its package imports vLLM
    file = Path(trl.origin).parent / "experimental/async_grpo/vllm_client.py"
    spec = importlib.util.spec_from_file_location("vllm_client", file)
    vllm_client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vllm_client)
    with running_proxy(two, TOKEN) as url:
        client = vllm_client.VLLMClient(str(url), server_timeout=60)
        client.wait_for_server_ready()
        served = client.get_max_model_len(), client.get_dtype(), client.get_world_size()
        assert served == (4096, "torch.bfloat16", 1)
        assert client.get_server_info()["lora_config"]["max_loras"] == 6
        for version in range(1, 9):
            client.pause()
            client.load_lora_adapter(f"v{version}", f"/lora/v{version}")
            client.resume()
            if version > 5:
                client.unload_lora_adapter(f"v{version - 5}")
        newest = [f"v{n}" for n in range(4, 9)]
        wait_until(lambda: all(list(fake.adapters) == newest for fake in two))
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
                body = {"model": "v1", "prompt": prompt, "max_tokens": 8, "n": 1}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    answers.append((await response.json())["choices"][0])

            prompts = [prompt for prompt in [ids(135) for _ in range(64)] for _ in range(8)]
            await asyncio.gather(*map(one, prompts))
        return answers

    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        answers = asyncio.run(rollouts(url))
        assert len(answers) == 512 and {answer["text"] for answer in answers} == {"weights-1"}
        now = stats(url)
        assert now["routed"] == 512 and now["retried"] == now["ejected"] == 0
        assert inflight(url) == [0, 0]
