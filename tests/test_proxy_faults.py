"""proxy.py when things break: no rollout is lost, no policies are mixed, and every wait ends."""

import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_vllm import BASE, FakeVLLM, running_proxy, wait_until
from test_proxy import TOKEN, ask, ids, in_background, load, stats, text, two, unload

__all__ = ["two"]  # the fixture: two replicas on one bucket

QUICK = {"PROBE_S": 0.05, "PROVE_S": 2}


def states(url):
    return [replica["state"] for replica in stats(url)["replicas"]]


def inflight(url):
    return [replica["inflight"] for replica in stats(url)["replicas"]]


# ---- a replica fails: it is out at once, its requests are answered elsewhere


@pytest.mark.parametrize("mode", ["reset", "reset in body", "500", "503", "engine dead", "401", "redirect"])
def test_a_request_that_a_replica_fails_is_answered_by_another(two, mode):
    with running_proxy(two, TOKEN, PROBE_S=30) as url:
        load(url, "v1", "/lora/v1")
        two[0].elsewhere = "http://127.0.0.1:9/"
        two[0].mode = mode
        prompts = [ids(40) for _ in range(6)]
        answers = [ask(url, prompt, "v1") for prompt in prompts]
        assert {text(answer) for answer in answers} == {"weights-1"}
        assert {answer.headers["X-Replica"] for answer in answers} == {"1"}
        assert len(two[0].completions()) == 1, "out at once: nobody else's request was lost to it"
        now = stats(url)
        assert (now["retried"], now["ejected"], inflight(url)) == (1, 1, [0, 0])
        assert now["replicas"][0]["state"] != "ready"


def test_a_replica_that_died_is_out_and_all_its_requests_are_answered(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.delay = 60
        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, url, ids(40), "v1") for _ in range(16)]
            wait_until(lambda: two[0].active == two[1].active == 8)
            two[0].stop()
            wait_until(lambda: two[1].active == 16)
            two[1].delay = 0
            assert {text(answer.result(10)) for answer in answers} == {"weights-1"}
        now = stats(url)
        assert (now["retried"], now["ejected"]) == (8, 1)
        wait_until(lambda: "Connection refused" in stats(url)["replicas"][0]["reason"])


def test_a_404_for_an_adapter_it_should_hold_takes_a_replica_out(two):
    """It was restarted behind our back. It gets its adapters anew before its next request."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        two[0].adapters.clear()
        assert [text(ask(url, ids(40), "v1")) for _ in range(4)] == ["weights-1"] * 4
        assert stats(url)["ejected"] == 1
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v1"]


def test_a_replica_that_fails_swallows_no_traffic(two):
    """With nothing in flight it looks least loaded. Sixty requests while it is broken: it gets the first alone."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        two[0].mode = "500"
        for _ in range(60):
            assert text(ask(url, ids(40))) == "base"
        assert len(two[0].completions()) == 1
        assert stats(url)["retried"] == 1


def test_a_clients_own_mistake_is_passed_on_once_and_untouched(two):
    with running_proxy(two, TOKEN) as url:
        load(url, "v1", "/lora/v1")
        wrong, unknown = ask(url, [-1], "v1"), ask(url, ids(40), "v9")
        assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "This is the client's own mistake")
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "The model `v9` does not exist.")
        assert len(two[0].completions() + two[1].completions()) == 2
        assert stats(url)["ejected"] == stats(url)["retried"] == 0


def test_a_request_that_breaks_every_replica_gets_its_error_in_the_end(two):
    for fake in two:
        fake.poison = 7
    with running_proxy(two, TOKEN, **QUICK) as url:
        answer = ask(url, [7] * 20)
        assert answer.status_code == 500 and "the fake fails with 500" in answer.text
        assert 2 < len(two[0].completions() + two[1].completions()) < 10
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert text(ask(url, ids(40))) == "base"


def test_a_request_that_kills_the_connection_everywhere_gets_a_502(two):
    with running_proxy(two, TOKEN, MAX_RESENDS=1, **QUICK) as url:
        for fake in two:
            fake.mode = "reset"
        answer = ask(url, ids(20))
        assert answer.status_code == 502 and "2 times a replica failed with this request" in answer.text


def test_a_stream_whose_replica_dies_is_cut_and_the_replica_is_out(two):
    with running_proxy(two, TOKEN, PROBE_S=30) as url:
        for fake in two:
            fake.events = threading.Semaphore(1)
        answer = requests.post(f"{url}/v1/completions", json={"prompt": ids(20), "stream": True}, stream=True)
        fake = two[int(answer.headers["X-Replica"])]
        lines = answer.iter_lines()
        assert next(lines).startswith(b"data: ")
        fake.mode = "reset in body"
        fake.events.release()
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            list(lines)
        wait_until(lambda: stats(url)["ejected"] == 1)
        assert inflight(url) == [0, 0]


# ---- a replica hangs


def test_a_hung_replica_is_noticed_and_its_requests_are_answered_elsewhere(two, capsys):
    with running_proxy(two, TOKEN, HANG_S=0.5, PROVE_S=1, PROBE_S=0.05) as url:
        two[0].mode = "hang"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(url, ids(40)), range(8)))
        assert [text(answer) for answer in answers] == ["base"] * 8
        assert stats(url)["ejected"] == 1
        assert two[0].calls("/health"), "it still answers /health"
    assert "out: hangs: no answer for 0.5 s, and no token on request" in capsys.readouterr().out


def test_a_hung_replica_comes_back_only_when_it_generates_a_token(two):
    with running_proxy(two, TOKEN, HANG_S=0.5, PROVE_S=1, PROBE_S=0.05) as url:
        two[0].mode = "hang"
        answers = [in_background(ask, url, ids(40)) for _ in range(2)]
        wait_until(lambda: states(url) == ["out", "ready"])
        seen = len(two[0].calls("/health"))
        wait_until(lambda: len(two[0].calls("/health")) > seen + 1)
        assert states(url) == ["out", "ready"] and stats(url)["readmitted"] == 0
        two[0].mode = ""
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert stats(url)["readmitted"] == 1
        assert [text(answer.result(5)) for answer in answers] == ["base"] * 2


def test_a_long_generation_is_no_hang(two):
    """Requests older than the limit, but the engine gives a token when asked for one: nothing happens."""
    with running_proxy(two, TOKEN, HANG_S=0.2, PROVE_S=5, PROBE_S=0.05) as url:
        two[0].delay = two[1].delay = 60
        slow = in_background(ask, url, ids(40))
        asked = lambda: [body["prompt"] for fake in two for body in fake.calls("/v1/completions")]  # noqa: E731
        wait_until(lambda: asked().count([0]) >= 2)
        two[0].delay = two[1].delay = 0
        assert text(slow.result(5)) == "base"
        assert stats(url)["ejected"] == stats(url)["retried"] == 0


def test_a_single_replica_that_hangs_is_noticed_too():
    with FakeVLLM() as fake, running_proxy([fake], HANG_S=0.5, PROVE_S=1, PROBE_S=0.05) as url:
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
        assert {text(answer.result(10)) for answer in answers} == {"weights-1"}
        assert requests.get(f"{url}/health").status_code == 200
        assert f"replica 1 ({two[0].url})" in requests.get(f"{url}/health").json()["out"]


def test_a_held_request_ends_at_the_deadline(two):
    with running_proxy(two, TOKEN, HOLD_DEADLINE_S=0.3, **QUICK) as url:
        for fake in two:
            fake.stop()
        answer = ask(url, ids(40))
        assert answer.status_code == 503 and "no replica took the request within 0.3 s" in answer.text
        assert two[0].url in answer.text and "Connection refused" in answer.text


def test_a_request_that_is_being_generated_ends_at_the_deadline_and_blames_nobody(two):
    with running_proxy(two, TOKEN, HOLD_DEADLINE_S=0.3, **QUICK) as url:
        two[0].delay = two[1].delay = 60
        assert ask(url, ids(40)).status_code == 504
        assert stats(url)["ejected"] == 0 and inflight(url) == [0, 0]
        wait_until(lambda: two[0].active + two[1].active == 0)


def test_a_returning_replica_gets_every_live_adapter_in_order_and_then_traffic(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        for n in (1, 2, 3):
            load(url, f"v{n}", f"/lora/v{n}")
        unload(url, "v1")
        wait_until(lambda: all(list(fake.adapters) == ["v2", "v3"] for fake in two))
        two[0].stop()
        wait_until(lambda: states(url) == ["out", "ready"])
        load(url, "v4", "/lora/v4")
        wait_until(lambda: stats(url)["adapters"]["v4"]["state"] == "live")
        two[0].sight["/lora/v3"] = "nothing"
        two[0].log.clear()
        two[0].start()
        wait_until(lambda: len(two[0].calls("/v1/load_lora_adapter")) >= 3)
        assert states(url) == ["joining", "ready"] and list(two[0].adapters) == ["v2"]
        assert {ask(url, ids(40), name).headers["X-Replica"] for name in ("v2", "v3", "v4", BASE)} == {"1"}
        two[0].sight.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v2", "v3", "v4"]
        assert not two[0].completions()
        assert stats(url)["readmitted"] == 1
        wait_until(lambda: ask(url, ids(40), "v4").headers["X-Replica"] == "0")


def test_a_returning_replica_that_kept_its_memory_is_cleaned(two):
    """It was only cut off: its adapters are of another time, its cache is not to be trusted."""
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
        first = int(ask(url, prompt).headers["X-Replica"])
        two[first].stop()
        wait_until(lambda: states(url)[first] == "out")
        two[first].start()
        wait_until(lambda: states(url) == ["ready", "ready"])
        before = stats(url)["unmatched"]
        ask(url, prompt)
        assert stats(url)["unmatched"] == before + 1


def test_late_news_of_an_earlier_life_changes_nothing(two):
    """A request that failed on a replica before that went out and came back must not take it out again."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        two[0].delay = two[1].delay = 60
        slow = in_background(ask, url, ids(40))
        wait_until(lambda: two[0].active + two[1].active == 1)
        index = 0 if two[0].active else 1
        replica, old = url.fleet.replicas[index], url.fleet.replicas[index].owner
        url.fleet.eject(replica, old, "a test")
        two[0].delay = two[1].delay = 0
        assert text(slow.result(5)) == "base"
        wait_until(lambda: states(url) == ["ready", "ready"])
        url.fleet.eject(replica, old, "late news")
        assert states(url) == ["ready", "ready"] and stats(url)["ejected"] == 1


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


@pytest.mark.parametrize(
    "answer", [(500, "EngineCore encountered an issue."), (503, "starting"), (401, "Unauthorized")]
)
def test_a_replica_too_sick_to_load_is_out_and_the_load_goes_on(two, answer):
    with running_proxy(two, TOKEN, **QUICK) as url:
        two[0].sick["/v1/load_lora_adapter"] = answer
        assert load(url, "v1", "/lora/v1").status_code == 200
        assert states(url)[0] != "ready" and str(answer[0]) in stats(url)["replicas"][0]["reason"]
        two[0].sick.clear()
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert list(two[0].adapters) == ["v1"]


def test_a_load_with_no_replica_left_goes_on_when_one_returns(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.stop()
        wait_until(lambda: states(url) == ["out", "out"])
        assert load(url, "v2", "/lora/v2").status_code == 200
        two[1].start()
        wait_until(lambda: stats(url)["adapters"]["v2"]["state"] == "live")
        assert list(two[1].adapters) == ["v1", "v2"]


def test_a_retired_policy_that_nobody_holds_any_more_is_answered_like_an_aborted_request(two):
    """Its rollout can't go on; an error would make TRL try again 90 times and then die."""
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.delay = 60
        prompt = ids(40)
        running = in_background(ask, url, prompt, "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        unload(url, "v1")
        for fake in two:
            fake.stop()
        answer = running.result(10)
        choice = answer.json()["choices"][0]
        assert answer.status_code == 200 and choice["finish_reason"] == "abort"
        # One token: TRL's parser of answers raises on an empty one, and the rollout worker dies of it
        assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == (prompt[-1:], [0.0])
        wait_until(lambda: stats(url)["adapters"] == {})
        assert stats(url)["aborted"] == 1


def test_requests_of_a_retired_policy_move_to_another_replica_that_holds_it(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        for fake in two:
            fake.delay = 60
        running = in_background(ask, url, ids(40), "v1")
        wait_until(lambda: two[0].active + two[1].active == 1)
        unload(url, "v1")
        dying, other = two if two[0].active else two[::-1]
        other.delay = 0
        dying.stop()
        assert text(running.result(10)) == "weights-1"
        wait_until(lambda: not other.adapters)


# ---- clients that go away, connections that do


def test_a_client_that_goes_away_frees_its_replica(two):
    with running_proxy(two, TOKEN) as url:
        two[0].mode = two[1].mode = "hang"
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/v1/completions", json={"prompt": ids(40)}, timeout=0.3)
        wait_until(lambda: two[0].active + two[1].active == 0, seconds=2)
        assert two[0].aborted + two[1].aborted == 1
        wait_until(lambda: inflight(url) == [0, 0], seconds=2)
        assert stats(url)["ejected"] == stats(url)["retried"] == 0


def test_a_client_that_goes_away_while_it_is_held_is_forgotten(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        two[0].sight["/lora/v2"] = two[1].sight["/lora/v2"] = "nothing"
        load(url, "v2", "/lora/v2")
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/v1/completions", json={"model": "v2", "prompt": ids(40)}, timeout=0.3)
        assert stats(url)["held"] == 1
        wait_until(lambda: url.fleet.policies[-1].users == 0, seconds=2)
        two[0].sight.clear()
        two[1].sight.clear()
        wait_until(lambda: stats(url)["adapters"]["v2"]["state"] == "live")
        assert not two[0].completions() + two[1].completions()


def test_a_client_that_sends_its_next_request_early_has_not_left(two):
    with running_proxy(two, TOKEN) as url:
        two[0].delay = two[1].delay = 0.2
        one = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 16\r\n\r\n{"prompt": "hi"}'
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5) as sock:
            sock.sendall(one)
            wait_until(lambda: two[0].active + two[1].active == 1)
            sock.sendall(one)
            seen = b""
            while seen.count(b"HTTP/1.1 200") < 2:
                seen += sock.recv(65536)
        assert two[0].aborted + two[1].aborted == 0


@pytest.mark.parametrize("ours", [4, 60])
def test_idle_connections_that_the_server_closed_cost_nobody_a_request(two, ours):
    """With 60 s the proxy takes connections that are closed already, as it may by bad luck with 4."""
    for fake in two:
        fake.idle_s = 0.1
    with running_proxy(two, TOKEN, IDLE_S=ours) as url:
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                assert {text(answer) for answer in pool.map(lambda _: ask(url, ids(40)), range(8))} == {"base"}
            wait_until(lambda: not [c for fake in two for c in list(fake.connections)])
        assert stats(url)["retried"] == stats(url)["ejected"] == 0


# ---- health, admission, a changing fleet


def test_health_is_503_until_every_replica_was_ready_once_and_200_while_one_is():
    with FakeVLLM() as one, FakeVLLM() as other:
        other.sick["/health"] = (503, "")
        with running_proxy([one, other], ready=False, **QUICK) as url:
            wait_until(lambda: states(url)[0] == "ready")
            answer = requests.get(f"{url}/health")
            assert answer.status_code == 503 and f"replica 2 ({other.url})" in answer.text
            other.sick.clear()
            wait_until(lambda: requests.get(f"{url}/health").status_code == 200)
            one.stop()
            wait_until(lambda: states(url)[0] == "out")
            answer = requests.get(f"{url}/health")
            assert answer.status_code == 200 and f"replica 1 ({one.url}) out" in answer.text
            other.stop()
            wait_until(lambda: requests.get(f"{url}/health").status_code == 503)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "other/model"),
        ("dtype", "torch.float32"),
        ("max_loras", 5),
        ("max_lora_rank", 8),
        ("max_model_len", 99),
    ],
)
def test_a_replica_with_other_flags_is_not_admitted(key, value, capsys):
    with FakeVLLM() as one, running_proxy([one], **QUICK) as url, FakeVLLM() as other:
        right, other.config[key] = other.config[key], value
        requests.post(f"{url}/replicas", json={"urls": [one.url, other.url]})
        wait_until(lambda: "start it with the fleet's flags" in stats(url)["replicas"][1]["reason"])
        assert f"serves {key}={value} (the fleet: {right})" in stats(url)["replicas"][1]["reason"]
        assert states(url) == ["ready", "out"] and requests.get(f"{url}/health").status_code == 200
        assert f"{key}={value}" in capsys.readouterr().out
        other.config[key] = right
        wait_until(lambda: states(url) == ["ready", "ready"])


def test_a_wrong_token_is_said(two, capsys):
    with running_proxy(two, "hf_wrong", ready=False, **QUICK) as url:
        wait_until(
            lambda: "401" in stats(url)["replicas"][0]["reason"] and "401" in stats(url)["replicas"][1]["reason"]
        )
        assert requests.get(f"{url}/health").status_code == 503
        out = capsys.readouterr().out
        assert "401" in out and "hf_wrong" not in out and len(out.splitlines()) < 10


def test_a_server_without_dev_mode_is_told_what_is_missing():
    with FakeVLLM() as fake:
        fake.sick["/server_info"] = (404, {"detail": "Not Found"})
        with running_proxy([fake], ready=False, **QUICK) as url:
            wait_until(lambda: "VLLM_SERVER_DEV_MODE=1" in stats(url)["replicas"][0]["reason"])


def test_a_server_without_runtime_loading_is_told_what_is_missing(two):
    with running_proxy(two, TOKEN) as url:
        two[0].sick["/v1/load_lora_adapter"] = (404, {"detail": "Not Found"})
        answer = load(url, "v1", "/lora/v1")
        assert answer.status_code == 424 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in answer.text


def test_garbage_from_a_server_is_no_end_of_the_thread_that_keeps_it():
    with FakeVLLM() as fake:
        for garbage in ("<html>", "[]", '{"vllm_config": 5}', '{"vllm_config": {"model_config": [5]}}'):
            fake.sick["/server_info"] = (200, garbage)
            with running_proxy([fake], ready=False, **QUICK) as url:
                wait_until(lambda: "unexpected answer" in stats(url)["replicas"][0]["reason"])
                fake.sick.clear()
                wait_until(lambda: states(url) == ["ready"])


def test_replicas_are_added_and_removed_while_it_runs(two):
    with running_proxy(two, TOKEN, **QUICK) as url:
        load(url, "v1", "/lora/v1")
        with FakeVLLM(TOKEN, two[0].bucket) as third:
            two[0].delay = 60
            answers = [in_background(ask, url, ids(40), "v1") for _ in range(2)]
            wait_until(lambda: two[0].active == 1)
            now = requests.post(f"{url}/replicas", json={"urls": [two[1].url, third.url + "/"]}).json()
            assert [replica["url"] for replica in now["replicas"]] == [two[1].url, third.url]
            assert {text(answer.result(10)) for answer in answers} == {"weights-1"}  # one of them was sent again
            wait_until(lambda: states(url) == ["ready", "ready"])
            assert list(third.adapters) == ["v1"]
            wait_until(lambda: ask(url, ids(40), "v1").headers["X-Replica"] == "1")
            assert stats(url)["ejected"] == 0
            before = len(two[0].log)
            assert requests.get(f"{url}/health").status_code == 200
            wait_until(lambda: len(third.calls("/health")) > 5)
            assert len(two[0].log) == before, "nobody asks the removed one any more"


@pytest.mark.parametrize("urls", [[], "x", ["ftp://x"], [5], None, ["http://"]])
def test_a_wrong_list_of_replicas_is_refused_and_changes_nothing(two, urls):
    with running_proxy(two, TOKEN) as url:
        assert requests.post(f"{url}/replicas", json={"urls": urls}).status_code == 400
        assert states(url) == ["ready", "ready"]


def test_rollouts_survive_replicas_that_die_and_return_all_the_time(two):
    """A minute of chaos in seconds: TRL would see no error, and no answer is made with other weights."""
    stop, wrong, done = threading.Event(), [], []
    with running_proxy(two, TOKEN, PROBE_S=0.05, PROVE_S=2, RETRY_S=(0.02,)) as url:
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
            seen, begin = len(done), time.monotonic()
            wait_until(lambda seen=seen: len(done) > seen + 8)
            fake.mode = ""
            if fake.server is None:
                fake.start()
            wait_until(lambda: states(url) == ["ready", "ready"])
            assert time.monotonic() - begin < 10
        stop.set()
        for worker in workers:
            worker.join(10)
        assert not wrong, wrong[:3]
        assert set(done) == {200} and stats(url)["ejected"] >= 6
        wait_until(lambda: all(list(fake.adapters) == [f"v{n}" for n in range(5, 10)] for fake in two))


def test_a_request_on_its_way_to_a_replica_that_is_taken_out_goes_elsewhere(two):
    """Its connection did not exist yet when those in use were cut: it must not wait at a replica that may hang."""
    ours, clients = socket.socketpair()
    with ours, clients, running_proxy(two, TOKEN, PROBE_S=30) as url:
        flight = url.fleet.route(None, [], ours, time.monotonic() + 5)
        url.fleet.eject(flight.replica, flight.owner, "a test")
        flight.replica.cut()
        with pytest.raises(EOFError, match="taken out of service"):
            flight.replica.ask(flight, b"", ours, time.monotonic() + 5)
        url.fleet.release(flight)
