"""More of the Jobs API stand-in: around a command, an organisation, addresses below the API's.

python -m pytest tests/test_jobs_api_more.py        # 10 s
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from test_jobs_api import (
    BIN,
    DEADLINE_S,
    ROOT,
    STREAMER,
    TOKEN,
    alive,
    fetch,
    free_port,
    stand_in,
    until,
)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with stand_in(tmp_path_factory.mktemp("more") / "state", "--grace", "1") as server:
        yield server


def opened(url: str, path: str) -> http.client.HTTPResponse:
    """The answer to a GET, whose body is still to be read."""
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {TOKEN}"})
    return urllib.request.urlopen(request, timeout=DEADLINE_S)


def test_exposed_port_below_the_api(api):
    port = free_port()
    env, expose = {"PORT": str(port)}, {"ports": [port]}
    job_id = api.submit("python3", "-c", STREAMER, environment=env, expose=expose)
    url = f"{api.url}/exposed/{job_id}/{port}"
    api.logged(job_id, "ready")

    assert fetch(url, "/any%2Fpath?query=1%20&x") == (200, "/any%2Fpath?query=1%20&x")
    assert fetch(url, "") == fetch(url, "/") == (200, "/")
    for token in (None, "wrong", ""):
        assert fetch(url, "/hello", token)[0] == 401
    for path in (f"/{job_id}/{port + 1}", f"/{'0' * 24}/{port}", f"/{job_id}", ""):
        assert fetch(f"{api.url}/exposed{path}")[0] == 404

    # SIGUSR1 cuts both ways to the Job, each on both sides; not a log that is followed.
    [own] = api.job(job_id)["status"]["exposeUrls"]
    log = opened(api.url, f"/api/jobs/local/{job_id}/logs")
    answers = [opened(url, "/stream"), opened(own, "/stream")]
    assert [answer.read(6) for answer in answers] == [b"first,"] * 2
    os.kill(api.process.pid, signal.SIGUSR1)
    for answer in answers:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    until(lambda: api.log(job_id).count("client left") == 2, "the Job's server to notice")
    assert fetch(url, "/hello") == fetch(own, "/hello") == (200, "/hello")

    api.cancel(job_id)
    api.ended(job_id)
    assert fetch(url) == (503, '{"error": "The Job has ended"}')
    assert log.read().count(b"client left") == 2  # whole


def test_job_port_for_a_command_with_the_word_vllm(api):
    serve = 'exec python3 -m http.server --bind 127.0.0.1 "$JOB_PORT" # as /bin/vllm would'
    job_id = api.submit("sh", arguments=["-c", serve], expose={"ports": [8000]})
    url = f"{api.url}/exposed/{job_id}/8000"
    status, body = until(lambda: (got := fetch(url))[0] != 503 and got, "the Job's server")
    assert status == 200 and "Directory listing" in body
    api.cancel(job_id)

    show = 'echo "${JOB_PORT-none}"'
    not_exposed = api.submit("sh", "-c", f"{show} # vllm")
    another_word = api.submit("sh", "-c", f"{show} # vllm_lora", expose={"ports": [8001]})
    assert api.ended(not_exposed) and api.log(not_exposed)[1] == "none"
    assert api.ended(another_word) and api.log(another_word)[1] == "none"


def test_organisation(api, tmp_path):
    assert "orgs=lab" in api.hf("auth", "whoami").replace(": ", "=").replace(" ", "")
    assert "lab/x" in api.hf("buckets", "create", "lab/x", "--quiet")
    command = ("-v", f"hf://buckets/lab/x:{tmp_path}/x", "image", "touch", f"{tmp_path}/x/made")
    job_id, of_user = api.start("--namespace", "lab", *command), api.submit("true")

    job = api.get(f"/api/jobs/lab/{job_id}")
    assert (job["owner"]["name"], job["initiator"]["name"]) == ("lab", "local")
    listed = json.loads(api.hf("jobs", "list", "--all", "--json", "--namespace", "lab"))
    assert [job["id"] for job in listed] == [job_id]
    assert job_id not in [job["id"] for job in api.get("/api/jobs/local")]
    assert "COMPLETED" in api.hf("jobs", "wait", "--namespace", "lab", job_id)
    assert (api.state / "buckets/lab/x/made").exists()
    assert [bucket["id"] for bucket in api.get("/api/buckets/lab")] == ["lab/x"]
    for path in (f"jobs/local/{job_id}", f"jobs/lab/{of_user}"):
        assert fetch(api.url, f"/api/{path}")[0] == 404
    for path in ("jobs/other", f"jobs/other/{job_id}", "buckets/other", "buckets/other/x"):
        assert fetch(api.url, f"/api/{path}")[0] == 403


def test_jobs_are_refused_for_a_while(api):
    (api.state / "refuse").touch()
    refused = api.hf("jobs", "run", "--detach", "image", "true", code=1)
    assert "503 Service Unavailable" in refused and "No Jobs are accepted at present" in refused
    (api.state / "refuse").unlink()
    assert api.ended(api.submit("true"))["status"]["stage"] == "COMPLETED"


def around(folder: Path, *command: str) -> subprocess.Popen:
    """A stand-in around a command, as the leader of a process group."""
    run = [sys.executable, str(ROOT / "local/jobs_api.py"), "--state", str(folder / "state")]
    run += ["--log", str(folder / "log"), "--grace", "0", "--", *command]
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder), "HF_TOKEN": TOKEN}
    return subprocess.Popen(
        run, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # pytest under nohup
    )  # fmt: skip


def test_around_a_command(tmp_path):
    script = """
        read word; echo "$word" "$1"; echo error >&2
        ps -o pgid= -p $$
        echo "$HF_ENDPOINT"
        hf jobs run --detach --quiet image sleep 600 2>/dev/null
        exit 7"""
    process = around(tmp_path, "bash", "-c", script, "bash", "--grace")
    out, err = process.communicate("typed\n", timeout=DEADLINE_S)
    word, argument, group, endpoint, job_id = out.split()
    assert (process.returncode, err, word, argument) == (7, "error\n", "typed", "--grace")
    assert int(group) == process.pid
    log = (tmp_path / "log").read_text()
    assert log.startswith(f"[jobs] {endpoint}\n") and f"[jobs] {job_id} CANCELED" in log
    record = json.loads((tmp_path / f"state/jobs/{job_id}/job.json").read_text())
    assert record["status"]["stage"] == "CANCELED"


@pytest.mark.parametrize(("command", "code"), [("kill -9 $$", 137), ("true", 0), ("missing", 127)])
def test_exit_code_of_the_command(tmp_path, command, code):
    process = around(tmp_path, *(["sh", "-c", command] if " " in command else [command]))
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code


# When a signal comes, it asks the API once more.
ASK = r"""
import os, signal, sys, urllib.request
def end(signum, frame):
    headers = {"Authorization": "Bearer " + os.environ["HF_TOKEN"]}
    whoami = urllib.request.Request(os.environ["HF_ENDPOINT"] + "/api/whoami-v2", headers=headers)
    os.write(1, b"%d %d\n" % (signum, urllib.request.urlopen(whoami).status))
    sys.exit(5)
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler  # bash can trap no ignored one
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, end)
os.write(1, b"ready\n")
signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_the_commands(tmp_path, signum):
    process = around(tmp_path, sys.executable, "-c", ASK)
    assert process.stdout.readline() == "ready\n"
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, err, process.returncode) == (f"{int(signum)} 200\n", "", 5)


def test_command_and_jobs_die_with_the_stand_in(tmp_path):
    job = "echo $$ > pid; sleep 600"
    start = f"hf jobs run --detach --quiet image sh -c '{job}' 2>/dev/null"
    process = around(tmp_path, "bash", "-c", f"{start}; echo $$; exec sleep 600")
    job_id, pid = process.stdout.readline().strip(), int(process.stdout.readline())
    file = tmp_path / "state/jobs" / job_id / "work" / "pid"
    of_job = int(until(lambda: file.exists() and file.read_text(), "the Job to run"))
    assert alive(pid) and alive(of_job)
    process.kill()
    process.communicate(timeout=DEADLINE_S)  # the watchdog holds stdout, too
    assert not alive(pid) and not alive(of_job)
