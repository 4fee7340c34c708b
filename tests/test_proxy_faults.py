"""proxy.py when things break: no rollout is lost, no policies are mixed, and every wait ends."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from fake_vllm import BASE, FakeVLLM, running_proxy, wait_until
from test_proxy import (
    TOKEN,
    ask,
    connect,
    ids,
    in_background,
    inflight,
    live,
    load,
    reason,
    states,
    stats,
    text,
    two,
    unload,
    where,
)

__all__ = ["two"]  # the fixture: two replicas on one bucket

QUICK = {"PROBE_S": 0.05, "CONTROL_S": 2, "RETRY_S": 0.02}
MODES = ["reset", "reset in body", "500", "503", "engine dead", "401", "redirect"]


def slow(fakes, delay=60):
    for fake in fakes:
        fake.delay = delay


def home_of(url, prompt, fakes, **fields):
    """(the replica that a prompt goes to from now on, the other one)"""
    number = where(ask(url, prompt, **fields), fakes)
    return fakes[number], fakes[1 - number]


# ---- one failed request is no verdict: the replica is doubted, and must prove itself


@pytest.mark.parametrize("mode", MODES)
def test_one_failed_request_is_answered_elsewhere_and_costs_the_replica_nothing(two, mode):
    """Its prefix cache is not reset, and its other nineteen requests go on."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        prompt = ids(40)
        sick, other = home_of(url, prompt, two, model="v1")
        slow(two)
        others = [in_background(ask, url, ids(40), "v1") for _ in range(38)]
        wait_until(lambda: two[0].active == two[1].active == 19)
        sick.elsewhere = "http://127.0.0.1:9/"
        sick.poison, other.poison = {prompt[0]: mode}, {prompt[0]: ""}
        resets, proofs = sick.resets, len(sick.proofs())
        answer = ask(url, prompt, "v1")
        assert (text(answer), answer.headers["X-Replica"]) == ("weights-1", other.url)
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert f"{sick.url} doubted: /v1/completions: " in url.said
        assert (sick.resets, sick.aborted, sick.active) == (resets, 0, 19)
        assert len(sick.proofs()) == proofs + 1
        slow(two, 0)
        assert {text(answer.result(30)) for answer in others} == {"weights-1"}
        now = stats(url)
        assert (now["retried"], now["ejected"]) == (1, 0)


def test_a_doubted_replica_gets_no_new_requests_until_it_has_proved_itself(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        prompt = ids(40)
        sick, other = home_of(url, prompt, two)
        sick.poison, sick.gate = {prompt[0]: "500"}, {"/v1/models": threading.Event()}
        for question in [prompt] + [ids(40) for _ in range(6)]:
            assert ask(url, question).headers["X-Replica"] == other.url
        assert sorted(states(url)) == ["doubted", "ready"]
        sick.gate["/v1/models"].set()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert {where(ask(url, ids(40)), two) for _ in range(4)} == {0, 1}


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_that_cannot_prove_itself_is_out_and_swallows_no_traffic(two, mode):
    """With nothing in flight it looks least loaded."""
    with running_proxy(two, TOKEN, PROBE_S=30) as url:
        load(url, "v1", "/lora/v1")
        two[0].elsewhere, two[0].mode = "http://127.0.0.1:9/", mode
        answers = [ask(url, ids(40), "v1") for _ in range(12)]
        assert {text(answer) for answer in answers} == {"weights-1"}
        assert {where(answer, two) for answer in answers} == {1}
        assert len(two[0].completions()) == 1
        wait_until(lambda: states(url) == ["out", "ready"])
        now = stats(url)
        assert (now["retried"], now["ejected"], inflight(url)) == (1, 1, [0, 0])


def test_a_replica_that_was_restarted_behind_our_back_gets_its_adapters_anew(two):
    """It answers 404 for an adapter that it should hold."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        two[0].adapters.clear()
        assert [text(ask(url, ids(40), "v1")) for _ in range(4)] == ["weights-1"] * 4
        wait_until(lambda: "it does not hold its adapters" in url.said)
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v1"] and stats(url)["ejected"] == 1


def test_a_replica_that_died_is_out_and_all_its_requests_are_answered(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        slow(two)
        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, url, ids(40), "v1") for _ in range(16)]
            wait_until(lambda: two[0].active == two[1].active == 8)
            two[0].stop()
            wait_until(lambda: two[1].active == 16)
            two[1].delay = 0
            assert {text(answer.result(30)) for answer in answers} == {"weights-1"}
        wait_until(lambda: "Connection refused" in reason(url))
        now = stats(url)
        assert (now["retried"], now["ejected"]) == (8, 1)


def test_a_failed_health_check_is_a_doubt_too(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        resets = two[0].resets
        two[0].sick["/health"] = (503, "busy")
        wait_until(lambda: f"{two[0].url} doubted: /health: 503 busy" in url.said)
        two[0].sick.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert stats(url)["ejected"] == 0
        assert two[0].resets == resets and list(two[0].adapters) == ["v1"]


@pytest.mark.parametrize(("mode", "status"), [("500", 500), ("reset", 502)])
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_a_request_that_fails_everywhere_is_itself_to_blame(two, path, mode, status):
    """A poisonous prompt costs no replica its place or its prefix cache, however often TRL asks."""
    for fake in two:
        fake.poison = {7: mode}
    with running_proxy(two, TOKEN, MAX_FAILURES=3, **QUICK) as url:
        resets = [fake.resets for fake in two]
        for tries in range(1, 4):
            body = {"prompt": [7] * 20, "token_ids": [7] * 20}
            answer = requests.post(url + path, json=body, timeout=30)
            assert answer.status_code == status
            assert ("the fake fails with 500" in answer.text) == (mode == "500")
            assert len(two[0].completions() + two[1].completions()) == 3 * tries
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert [fake.resets for fake in two] == resets
        assert text(ask(url, ids(40))) == "base" and stats(url)["ejected"] == 0


def test_a_clients_own_mistake_is_passed_on_once_and_untouched(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        wrong, unknown = ask(url, [-1], "v1"), ask(url, ids(40), "v9")
        assert wrong.status_code == 400 and unknown.status_code == 404
        assert wrong.json()["error"]["message"] == "This is the client's own mistake"
        assert unknown.json()["error"]["message"] == "The model `v9` does not exist."
        assert len(two[0].completions() + two[1].completions()) == 2
        assert stats(url)["retried"] == 0 and "doubted" not in url.said


# ---- a replica hangs


def test_a_hung_replica_is_noticed_and_its_requests_are_answered_elsewhere(two):
    with running_proxy(two, TOKEN, HANG_S=0.5, CONTROL_S=1, PROBE_S=0.05) as url:
        two[0].mode = "hang"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(url, ids(40)), range(8)))
        assert [text(answer) for answer in answers] == ["base"] * 8
        assert f"{two[0].url} doubted: no answer for 0.5 s" in url.said
        assert two[0].calls("/health"), "it still answers /health"
        assert states(url) == ["out", "ready"] and "/v1/completions: 504 " in reason(url)
        two[0].mode = ""  # it comes back when it generates a token again
        wait_until(lambda: states(url) == ["ready", "ready"])
        now = stats(url)
        assert (now["ejected"], now["readmitted"]) == (1, 1)


def test_a_long_generation_is_no_hang(two):
    """Requests older than the limit, but the engine gives a token when asked for one."""
    with running_proxy(two, TOKEN, HANG_S=0.2, CONTROL_S=5, PROBE_S=0.05) as url:
        proofs = len(two[0].proofs() + two[1].proofs())
        slow(two)
        answer = in_background(ask, url, ids(40))
        wait_until(lambda: len(two[0].proofs() + two[1].proofs()) >= proofs + 2)
        slow(two, 0)
        assert text(answer.result(5)) == "base"
        assert stats(url)["ejected"] == stats(url)["retried"] == 0


def test_a_single_replica_that_hangs_is_noticed_too():
    with FakeVLLM() as fake, running_proxy([fake], HANG_S=0.5, CONTROL_S=1, PROBE_S=0.05) as url:
        fake.mode = "hang"
        answer = in_background(ask, url, ids(40))
        wait_until(lambda: states(url) == ["out"])
        fake.mode = ""
        assert text(answer.result(5)) == "base"


# ---- none is left, and they come back


def test_requests_wait_for_a_replica_to_come_back(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.stop()
        answers = [in_background(ask, url, ids(40), "v1") for _ in range(4)]
        wait_until(lambda: stats(url)["held"] == 4)
        assert requests.get(f"{url}/health").status_code == 503
        two[1].start()
        assert {text(answer.result(30)) for answer in answers} == {"weights-1"}
        health = requests.get(f"{url}/health")
        assert health.status_code == 200 and two[0].url in health.json()["out"]


def test_a_held_request_ends_at_the_deadline(two):
    with running_proxy(two, TOKEN, HOLD_DEADLINE_S=0.3, **QUICK) as url:
        for fake in two:
            fake.stop()
        wait_until(lambda: states(url) == ["out", "out"])
        answer = ask(url, ids(40))
        assert answer.status_code == 503 and "no replica in 0.3 s" in answer.text
        assert two[0].url in answer.text and "Connection refused" in answer.text


def test_a_request_that_is_being_generated_ends_at_the_deadline_and_blames_nobody(two):
    with running_proxy(two, TOKEN, HOLD_DEADLINE_S=0.3, **QUICK) as url:
        slow(two)
        assert ask(url, ids(40)).status_code == 504
        wait_until(lambda: two[0].active + two[1].active == 0)
        assert "doubted" not in url.said and inflight(url) == [0, 0]


def test_a_returning_replica_gets_every_live_adapter_in_order_and_then_traffic(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        for n in (1, 2, 3):
            load(url, f"v{n}", f"/lora/v{n}")
        unload(url, "v1")
        wait_until(lambda: all(list(fake.adapters) == ["v2", "v3"] for fake in two))
        two[0].stop()
        wait_until(lambda: states(url) == ["out", "ready"])
        load(url, "v4", "/lora/v4")
        live(url, "v4")
        two[0].sight["/lora/v3"] = "nothing"
        two[0].log.clear()
        two[0].start()
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) >= 3)
        assert states(url) == ["joining", "ready"] and list(two[0].adapters) == ["v2"]
        assert {where(ask(url, ids(40), name), two) for name in ("v2", "v3", "v4", BASE)} == {1}
        two[0].sight.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v2", "v3", "v4"]
        assert not two[0].completions() and stats(url)["readmitted"] == 1
        assert f"{two[0].url} in service with 3 adapters" in url.said
        assert {where(ask(url, ids(40), "v4"), two) for _ in range(4)} == {0, 1}


def test_a_returning_replica_that_kept_its_memory_is_cleaned(two):
    """It was only cut off: its adapters are of another time, and its cache is not to be trusted."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        two[0].stop()
        wait_until(lambda: states(url) == ["out", "ready"])
        unload(url, "v1")
        two[0].adapters["v2"] = ("/elsewhere/v2", "weights of nobody knows where")
        load(url, "v2", "/lora/v2")
        resets = two[0].resets
        two[0].start(fresh=False)
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert two[0].adapters == {"v2": ("/lora/v2", "weights-2")} and two[0].resets == resets + 1


def test_the_prefixes_of_a_replica_that_left_are_forgotten(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        prompt = ids(135)
        home, _ = home_of(url, prompt, two)
        home.stop()
        wait_until(lambda: "out" in states(url))
        home.start()
        wait_until(lambda: states(url) == ["ready", "ready"])
        before = stats(url)["unmatched"]
        ask(url, prompt)
        assert stats(url)["unmatched"] == before + 1


# ---- loads when replicas fail


def test_a_load_does_not_fail_because_one_of_several_replicas_died(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        two[0].sight["/lora/v1"] = two[1].sight["/lora/v1"] = "nothing"
        first = in_background(load, url, "v1", "/lora/v1")
        wait_until(lambda: two[0].calls("/v1/load_lora_adapter"))
        two[0].stop()
        wait_until(lambda: states(url) == ["out", "ready"])
        assert not first.done()
        two[1].sight.clear()
        assert first.result(5).status_code == 200
        assert text(ask(url, ids(40), "v1")) == "weights-1"


def test_a_load_with_no_replica_left_goes_on_when_one_returns(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.stop()
        wait_until(lambda: states(url) == ["out", "out"])
        assert load(url, "v2", "/lora/v2").status_code == 200
        two[1].start()
        live(url, "v2")
        assert list(two[1].adapters) == ["v1", "v2"]


def test_a_load_that_no_replica_takes_ends_at_a_deadline(two):
    deadlines = {"LOAD_DEADLINE_S": 0.3, "HOLD_DEADLINE_S": 0.3}
    with running_proxy(two, TOKEN, **QUICK | deadlines) as url:
        for fake in two:
            fake.stop()
        wait_until(lambda: states(url) == ["out", "out"])
        for name in ("v1", "v2"):
            refused = load(url, name, f"/lora/{name}")
            assert refused.status_code in (424, 503) and "v1" in refused.text
            assert two[0].url in refused.text and "Connection refused" in refused.text


def test_a_request_of_an_unloaded_policy_whose_replica_dies_is_answered_as_aborted(two):
    """No replica holds the policy any more, so it cannot go on."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        slow(two)
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        unload(url, "v1")
        for fake in two:
            fake.stop()
        assert running.result(30).json()["choices"][0]["finish_reason"] == "abort"
        assert stats(url)["adapters"] == {}


# ---- clients that go away, connections that do


def test_a_client_that_goes_away_frees_its_replica(two):
    with running_proxy(two, TOKEN) as url:
        two[0].mode = two[1].mode = "hang"
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/v1/completions", json={"prompt": ids(40)}, timeout=0.3)
        wait_until(lambda: two[0].active + two[1].active == 0)
        assert two[0].aborted + two[1].aborted == 1
        wait_until(lambda: inflight(url) == [0, 0])
        assert "doubted" not in url.said and stats(url)["retried"] == 0


def test_a_client_that_goes_away_while_it_is_held_is_forgotten(two):
    threads = lambda url: len(os.listdir(f"/proc/{url.process.pid}/task"))
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = two[1].sight["/lora/v2"] = "nothing"
        load(url, "v2", "/lora/v2")
        wait_until(lambda: threads(url) == 1 + 2 + 1)  # serving, two replicas, watching
        body = {"model": "v2", "prompt": ids(40)}
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/v1/completions", json=body, timeout=0.3)
        wait_until(lambda: threads(url) == 1 + 2 + 1)
        assert stats(url)["held"] == 1
        two[0].sight.clear()
        two[1].sight.clear()
        live(url, "v2")
        assert not two[0].completions() + two[1].completions()


def test_a_client_that_sends_its_next_request_early_has_not_left(two):
    with running_proxy(two, TOKEN) as url:
        slow(two, 1.5)  # the proxy looks every second for clients that left
        one = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 16\r\n\r\n{"prompt": "hi"}'
        with connect(url) as sock:
            sock.sendall(one)
            wait_until(lambda: two[0].active + two[1].active == 1)
            sock.sendall(one)
            seen = b""
            while seen.count(b"HTTP/1.1 200") < 2:
                seen += sock.recv(65536)
        assert two[0].aborted + two[1].aborted == 0


@pytest.mark.parametrize("ours", [0.05, 60])
def test_idle_connections_that_the_server_closed_cost_nobody_a_request(two, ours):
    """Whether the proxy would have used them again or not."""
    for fake in two:
        fake.idle_s = 0.1
    with running_proxy(two, TOKEN, IDLE_S=ours) as url:
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: ask(url, ids(40)), range(8)))
            assert {text(answer) for answer in answers} == {"base"}
            wait_until(lambda: not [c for fake in two for c in list(fake.connections)])
        assert stats(url)["retried"] == 0 and "doubted" not in url.said


# ---- health and admission


def test_health_is_503_until_every_replica_was_ready_once_and_200_while_one_is():
    with FakeVLLM() as one, FakeVLLM() as other:
        other.sick["/health"] = (503, "")
        with running_proxy([one, other], ready=False, **QUICK) as url:
            health = lambda: requests.get(f"{url}/health")
            wait_until(lambda: states(url)[0] == "ready")
            assert health().status_code == 503 and other.url in health().text
            other.sick.clear()
            wait_until(lambda: health().status_code == 200)
            one.stop()
            wait_until(lambda: states(url)[0] == "out")
            assert health().status_code == 200 and f"{one.url} out: " in health().text
            other.stop()
            wait_until(lambda: health().status_code == 503)


FLAGS = [
    ("model", "other/model"),
    ("dtype", "torch.float32"),
    ("max_loras", 5),
    ("max_lora_rank", 8),
    ("max_model_len", 99),
]


@pytest.mark.parametrize(("key", "value"), FLAGS)
def test_of_two_replicas_with_other_flags_only_one_is_taken(two, key, value):
    """They start at the same moment: both are asked for their flags before one is in service."""
    right, two[1].config[key] = two[1].config[key], value
    for fake in two:
        fake.gate["/server_info"] = threading.Event()
    with running_proxy(two, TOKEN, ready=False, **QUICK) as url:
        wait_until(lambda: all(fake.calls("/server_info") for fake in two))
        for fake in two:
            fake.gate["/server_info"].set()
        wait_until(lambda: "start it with these flags" in url.said)
        assert sorted(states(url)) == ["out", "ready"]
        refused = states(url).index("out")
        said = reason(url, refused)
        assert f"'{key}': {value!r}" in said and f"'{key}': {right!r}" in said
        assert requests.get(f"{url}/health").status_code == 503
        two[refused].config[key] = two[1 - refused].config[key]
        wait_until(lambda: states(url) == ["ready", "ready"])


def test_a_wrong_token_is_said(two):
    with running_proxy(two, "hf_wrong", ready=False, **QUICK) as url:
        wait_until(lambda: "401" in reason(url, 0) and "401" in reason(url, 1))
        assert requests.get(f"{url}/health").status_code == 503
        seen = len(two[0].log)
        wait_until(lambda: len(two[0].log) > seen + 3)
        assert url.said.count(": 401 ") == 2, "the same reason is not said again"


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        ((404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        ((200, {"vllm_config": {"model_config": {}}}), "--enable-lora"),
    ],
)
def test_a_server_that_was_started_otherwise_is_told_what_is_missing(answer, missing):
    with FakeVLLM() as fake:
        fake.sick["/server_info"] = answer
        with running_proxy([fake], ready=False, **QUICK) as url:
            wait_until(lambda: missing in reason(url))


@pytest.mark.parametrize("garbage", ["<html>", "[]", "5", "[" * 9999, '{"vllm_config": 5}'])
def test_garbage_from_a_server_is_no_end_of_the_thread_that_keeps_it(garbage):
    with FakeVLLM() as fake:
        fake.sick = dict.fromkeys(("/server_info", "/v1/models"), (200, garbage))
        with running_proxy([fake], ready=False, **QUICK) as url:
            wait_until(lambda: "/server_info" in reason(url))
            del fake.sick["/server_info"]
            wait_until(lambda: states(url) == ["ready"])
            assert text(ask(url, ids(20))) == "base"


def test_rollouts_survive_replicas_that_die_and_return_all_the_time(two):
    """A minute of chaos in seconds: TRL would see no error, and no answer has other weights."""
    stop, wrong, done = threading.Event(), [], []
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        newest = [1]

        def rollouts():
            while not stop.is_set():
                version = newest[0]
                got = ask(url, ids(64), f"v{version}")
                done.append(got.status_code)
                choice = got.json()["choices"][0] if got.status_code == 200 else {}
                stale = choice.get("finish_reason") == "abort" and version <= newest[0] - 5
                if choice.get("text") != f"weights-{version}" and not stale:
                    wrong.append((version, got.status_code, got.text))

        workers = [threading.Thread(target=rollouts) for _ in range(8)]
        for worker in workers:
            worker.start()
        for version in range(2, 10):
            fake = two[version % 2]
            if version % 3 == 0:
                fake.mode = "500"
            elif version % 3 == 1:
                fake.adapters.clear()
            else:
                fake.stop()
            load(url, f"v{version}", f"/lora/v{version}")
            newest[0] = version
            if version > 5:
                unload(url, f"v{version - 5}")
            seen = len(done)
            wait_until(lambda seen=seen: len(done) > seen + 8)
            while stats(url)["ejected"] < version - 1:  # a lost adapter must be asked for
                assert text(ask(url, ids(64), f"v{version - 1}")) == f"weights-{version - 1}"
            fake.mode = ""
            if fake.server is None:
                fake.start()
            wait_until(lambda: states(url) == ["ready", "ready"])
        stop.set()
        for worker in workers:
            worker.join(30)
        assert not wrong, wrong[:3]
        assert set(done) == {200} and stats(url)["ejected"] >= 8
        newest = [f"v{n}" for n in range(5, 10)]
        wait_until(lambda: all(list(fake.adapters) == newest for fake in two))
