"""The Jobs API stand-in, driven by the real `hf` CLI (huggingface_hub 2.4.0). Takes 40 s, needs
Linux.

    python -m pytest tests/test_jobs_api.py

Each flag that a launcher uses is followed from the command line to what the stand-in received and
what the Job's process saw. The mount namespaces of --reader-buckets need root; without it that one
test is skipped.
"""

import asyncio
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent  # where pip put `hf`
TOKEN = "hf_standin_0123456789"
DEADLINE_S = 60  # for anything a test waits for


def until(condition, what: str):
    """Poll `condition` until it is truthy and return its value; fail after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie that waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class StandIn:
    """A running local/jobs_api.py, the `hf` CLI that talks to it, and its plain HTTP answers."""

    def __init__(self, state: Path, *options: str, path: str = ""):
        self.state, self.log_path = state, state.with_suffix(".log")
        env = {
            "PATH": f"{path}:{BIN}:{os.environ['PATH']}",
            "HOME": str(state.parent),
            "LANG": "C.UTF-8",
        }
        env |= {"PASSED": "on", "NOT_PASSED": "on", "JOBS_API_PASS": "PASSED"}
        command = [sys.executable, str(ROOT / "local/jobs_api.py"), "--state", str(state), *options]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=log, text=True
            )
        line = self.process.stdout.readline()
        assert line.startswith("[jobs] http://127.0.0.1:"), f"{line!r}, {self.log_path.read_text()}"
        self.url = line.split()[1]

    def popen(self, *args: str, token: str | None = TOKEN) -> subprocess.Popen:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.state.parent), "HF_ENDPOINT": self.url}
        env |= {"HF_TOKEN": token} if token else {}
        env |= {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "LOCAL_ONLY": "from the shell"}
        command = [str(BIN / "hf"), *args]
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hf(self, *args: str, code: int = 0, token: str | None = TOKEN) -> str:
        """Run `hf`, check its exit code; its stdout, or its stderr if it is meant to fail."""
        process = self.popen(*args, token=token)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == code, f"hf {' '.join(args)}: {process.returncode}\n{out}{err}"
        return err if code else out

    def start(self, *args: str, **options) -> str:
        """`hf jobs run --detach --quiet`: the Job's id."""
        return self.hf("jobs", "run", "--detach", "--quiet", *args, **options).strip()

    def get(self, path: str, token: str = TOKEN):
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def post(self, path: str, payload: object = None) -> tuple[int, dict]:
        """Status and body of a POST, for what the CLI would not send or is not the subject."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(
            self.url + path, json.dumps(payload).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def submit(self, *command: str, **fields) -> str:
        """Start a Job without the CLI, which takes half a second per call: the Job's id."""
        payload = {"dockerImage": "image", "command": command, "flavor": "cpu-basic", **fields}
        status, job = self.post("/api/jobs/local", payload)
        assert status == 200, job
        return job["id"]

    def cancel(self, job_id: str) -> None:
        assert self.post(f"/api/jobs/local/{job_id}/cancel")[0] == 200

    def job(self, job_id: str) -> dict:
        return self.get(f"/api/jobs/local/{job_id}")

    def ended(self, job_id: str) -> dict:
        """The Job's record once its stage is terminal."""
        terminal = ("COMPLETED", "CANCELED", "ERROR")
        return until(
            lambda: (job := self.job(job_id))["status"]["stage"] in terminal and job,
            f"the end of {job_id}",
        )

    def log(self, job_id: str) -> list[str]:
        return [
            line.split(" ", 1)[1]
            for line in (self.state / "jobs" / job_id / "log").read_text().splitlines()
        ]

    def logged(self, job_id: str, text: str) -> list[str]:
        """The Job's log once it holds `text`."""
        return until(
            lambda: text in (lines := self.log(job_id)) and lines,
            f"{text!r} in the log of {job_id}",
        )

    def stop(self, signum: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            # the watchdog holds stdout too: its end is the end of all
            self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert "Traceback" not in self.log_path.read_text(), self.log_path.read_text()
        return self.process.returncode


@contextmanager
def stand_in(state: Path, *options: str, **more):
    server = StandIn(state, *options, **more)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """One stand-in for the tests that need nothing special of it, with a bucket `local/lora` and a
    fake `vllm`."""
    folder = tmp_path_factory.mktemp("jobs")
    vllm = folder / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(
        '#!/bin/sh\necho "vllm $*"\nexec python3 -m http.server --bind 127.0.0.1 "$JOB_PORT"\n'
    )
    vllm.chmod(0o755)
    with stand_in(folder / "state", "--grace", "1", path=str(vllm.parent)) as server:
        server.hf("buckets", "create", "local/lora", "--private", "--exist-ok")
        server.bucket = folder / "state/buckets/local/lora"
        yield server


DUMP_ENVIRONMENT = """
import hashlib, json, os
seen = dict(os.environ)
for name in ("HF_TOKEN", "WANDB_API_KEY"):
    seen[name] = hashlib.sha256(seen[name].encode()).hexdigest()
print(json.dumps(seen))
"""


def test_every_flag_arrives(api, tmp_path):
    mount, code = tmp_path / "lora", tmp_path / "code"
    (api.bucket / "scripts").mkdir()
    (api.bucket / "scripts/dump.py").write_text(DUMP_ENVIRONMENT)
    command = ["python3", f"{code}/dump.py", "--timeout", "5"]
    job_id = api.start(
        *("--flavor", "h200x2", "--timeout", "20m", "--attempts", "2", "--name", "trainer"),
        *("-e", "PLAIN=1", "--env", "SPACES=two words", "-e", "LOCAL_ONLY"),
        *("--secrets", "HF_TOKEN", "--secrets", "WANDB_API_KEY=wandb-secret-value"),
        *(
            "--label",
            "run=r1-dp3",
            "--label",
            "role=trainer",
            "--network-group",
            "group",
            "--network-alias",
            "head",
        ),
        *(
            "-v",
            f"hf://buckets/local/lora:{mount}",
            "-v",
            f"hf://buckets/local/lora/scripts:{code}:ro",
        ),
        *("--expose", "8000", "vllm/vllm-openai:v0.27.1"),
        # without the "--" the CLI would take the command's --timeout for its own
        *("--", *command),
    )
    job = api.ended(job_id)

    # What the stand-in received.
    assert len(job_id) == 24 and job["id"] == job_id and job["status"]["stage"] == "COMPLETED", job
    assert job["dockerImage"] == "vllm/vllm-openai:v0.27.1" and job["command"] == command
    assert job["flavor"] == "h200x2" and job["timeoutSeconds"] == 1200 and job["retry"] == 1
    assert job["labels"] == {"run": "r1-dp3", "role": "trainer", "name": "trainer"}
    assert job["environment"] == {
        "PLAIN": "1",
        "SPACES": "two words",
        "LOCAL_ONLY": "from the shell",
    }
    assert job["secrets"] == {"HF_TOKEN": "***", "WANDB_API_KEY": "***"}
    assert job["volumes"] == [
        {"type": "bucket", "source": "local/lora", "mountPath": str(mount)},
        {
            "type": "bucket",
            "source": "local/lora",
            "mountPath": str(code),
            "readOnly": True,
            "path": "scripts",
        },
    ]
    assert job["expose"]["ports"] == [8000] and job["network"] == {
        "group": "group",
        "aliases": ["head"],
    }

    # What the process saw: a short base, and then what was asked for.
    seen = json.loads(api.log(job_id)[1])
    assert seen["HF_TOKEN"] == hashlib.sha256(TOKEN.encode()).hexdigest()
    assert seen["WANDB_API_KEY"] == hashlib.sha256(b"wandb-secret-value").hexdigest()
    assert seen["JOB_ID"] == job_id and seen["HF_ENDPOINT"] == api.url and seen["PASSED"] == "on"
    assert job["environment"].items() <= seen.items()
    assert "NOT_PASSED" not in seen and "JOB_PORT" not in seen

    # Secrets are in no file, no answer and not in the stand-in's own log.
    answers = json.dumps(job) + json.dumps(api.get("/api/jobs/local")) + api.log_path.read_text()
    for secret in (TOKEN, "wandb-secret-value"):
        assert secret not in answers
        for file in (path for path in api.state.rglob("*") if path.is_file()):
            assert secret.encode() not in file.read_bytes(), file

    # What the CLI shows of it.
    [shown] = json.loads(api.hf("jobs", "inspect", "--json", job_id))
    assert shown["status"] == {"stage": "COMPLETED", "expose_urls": job["status"]["exposeUrls"]}
    assert shown["name"] == "trainer" and shown["durations"].keys() == {
        "scheduling_secs",
        "running_secs",
        "total_secs",
    }
    assert shown["created_at"] <= shown["started_at"] <= shown["finished_at"]
    listed = json.loads(
        api.hf(
            "jobs", "list", "--all", "--json", "--label", "run=r1-dp3", "--label", "role=trainer"
        )
    )
    assert [(item["id"], item["status"]) for item in listed] == [(job_id, "COMPLETED")]
    # without --all: active ones
    assert json.loads(api.hf("jobs", "list", "--json", "--label", "run=r1-dp3")) == []
    assert json.loads(api.hf("jobs", "list", "--json", "--all", "--label", "run=r1")) == []


def test_volumes_share_the_bucket(api, tmp_path):
    mount = tmp_path / "not/there/yet"
    volume = ("-v", f"hf://buckets/local/lora:{mount}")
    api.ended(
        api.start(
            *volume, "image", "sh", "-c", f"mkdir {mount}/v1 && echo weights > {mount}/v1/adapter"
        )
    )
    reader = api.start(*volume[:1], volume[1] + ":ro", "image", "cat", f"{mount}/v1/adapter")
    assert api.ended(reader)["status"]["stage"] == "COMPLETED" and api.log(reader)[1:] == [
        "weights"
    ]
    assert (api.bucket / "v1/adapter").read_text() == "weights\n"

    info = json.loads(api.hf("buckets", "info", "local/lora"))
    assert info["id"] == "local/lora" and info["private"] and info["total_files"] >= 1
    assert "v1/adapter" in api.hf("buckets", "list", "local/lora", "-R")
    # What would be fetched: the transfer itself is Xet's.
    sync = ("buckets", "sync", "hf://buckets/local/lora/v1", "first")
    plan = [json.loads(line) for line in api.hf(*sync, "--dry-run").splitlines()]
    assert [(item["action"], item["path"]) for item in plan[1:]] == [("download", "adapter")]
    assert "local/lora" in api.hf("buckets", "list")


def test_logs_follow_live_and_replay(api):
    command = "echo one; echo err >&2; while [ ! -e go ]; do sleep 0.05; done; "
    command += 'printf "three\\nno newline"'
    job_id = api.start("image", "sh", "-c", command)
    follower = api.popen("jobs", "logs", "-f", job_id)
    # while the Job runs
    assert [follower.stdout.readline(), follower.stdout.readline()] == ["one\n", "err\n"]
    assert api.job(job_id)["status"]["stage"] == "RUNNING"
    (api.state / "jobs" / job_id / "work/go").touch()
    rest, _ = follower.communicate(timeout=DEADLINE_S)
    assert (rest, follower.returncode) == ("three\nno newline\n", 0)
    assert (
        api.hf("jobs", "logs", job_id)
        == api.hf("jobs", "logs", "-f", job_id)
        == "one\nerr\nthree\nno newline\n"
    )
    assert api.hf("jobs", "logs", "--tail", "2", job_id) == "three\nno newline\n"


def test_wait_and_exit_codes(api):
    good, bad = api.start("image", "true"), api.start("image", "sh", "-c", "exit 3")
    killed, missing = api.submit("sh", "-c", "kill -9 $$"), api.submit("no-such-program")
    assert "COMPLETED" in api.hf("jobs", "wait", good)
    assert f"{bad} (ERROR)" in api.hf("jobs", "wait", good, bad, code=1)
    assert api.ended(bad)["status"]["message"] == "Job failed with exit code: 3"
    assert api.ended(killed)["status"]["message"] == "Job failed with exit code: 137"
    assert "No such file or directory: 'no-such-program'" in api.ended(missing)["status"]["message"]
    # not detached: follows
    assert "exit code: 4" in api.hf("jobs", "run", "image", "sh", "-c", "exit 4", code=1)


def test_attempts_run_the_command_again(api):
    command = "echo try; echo x >> tries; [ $(wc -l < tries) = 3 ]"
    job_id = api.start("--attempts", "4", "image", "sh", "-c", command)
    short = api.submit("sh", "-c", command, attempts=2)
    assert api.ended(job_id)["status"]["stage"] == "COMPLETED" and api.log(job_id).count("try") == 3
    assert api.ended(short)["status"]["stage"] == "ERROR" and api.log(short).count("try") == 2


# A child that ignores SIGTERM, one in a process group of its own, one in a session of its own, one
# orphan that has left the session, and one that hides its JOB_ID as well. Each writes its pid.
FAMILY = """
trap '' TERM
sh -c 'echo $$ >> pids; while :; do sleep 60; done' &
trap - TERM
set -m; sh -c 'echo $$ >> pids; exec sleep 60' & set +m
setsid sh -c 'echo $$ >> pids; exec sleep 60' &
(setsid sh -c 'echo $$ >> pids; exec sleep 60' &)
env -u JOB_ID setsid sh -c 'echo $$ >> pids; exec sleep 60' &
while [ "$(wc -l < pids)" != 5 ]; do sleep 0.05; done
echo ready
"""


def family(server: StandIn, job_id: str) -> list[int]:
    """Pids of the Job's five children, all running."""
    server.logged(job_id, "ready")
    pids = [
        int(line) for line in (server.state / "jobs" / job_id / "work/pids").read_text().split()
    ]
    assert len(pids) == 5 and all(map(alive, pids))
    return pids


def test_cancel_ends_every_descendant(api):
    job_id = api.start("image", "sh", "-c", FAMILY + "wait")
    pids = family(api, job_id)
    api.hf("jobs", "cancel", job_id)
    job = api.ended(job_id)
    assert not any(map(alive, pids))  # the stage is terminal only when all are gone
    assert job["status"] == {"stage": "CANCELED", "message": "Job canceled", "exposeUrls": None}
    assert f"{job_id} (CANCELED)" in api.hf("jobs", "wait", job_id, code=1)
    api.cancel(job_id)  # again: nothing happens
    assert api.job(job_id) == job


def test_sigterm_comes_first(api):
    job_id = api.submit(
        "sh", "-c", "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    )
    api.logged(job_id, "ready")
    api.cancel(job_id)
    assert api.ended(job_id)["status"]["stage"] == "CANCELED" and api.log(job_id)[-1] == "bye"


def test_command_end_takes_leftovers_along(api):
    job_id = api.submit(
        "sh", "-c", "trap '' TERM; setsid sleep 60 & echo $! > pid; sleep 60 & echo $! >> pid"
    )
    assert api.ended(job_id)["status"]["stage"] == "COMPLETED"
    pids = (api.state / "jobs" / job_id / "work/pid").read_text().split()
    assert len(pids) == 2 and not any(alive(int(pid)) for pid in pids)


def test_timeout(api):
    job = api.ended(api.start("--timeout", "1s", "--attempts", "3", "image", "sleep", "60"))
    assert job["status"]["stage"] == "ERROR" and "timeout" in job["status"]["message"]
    assert job["durations"]["runningSecs"] in (0, 1)  # rounded down, and no second attempt
    assert api.job(api.submit("true"))["timeoutSeconds"] == 1800  # the default of Hugging Face


# Answers /stream with a chunk, waits for the file `go`, and sends another; tells whether the client
# stayed.
STREAMER = """
import http.server, os, socket, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))
    def do_GET(self):
        if self.path != "/stream":
            return self.answer(self.path.encode())
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"first,")
        self.connection.settimeout(0.05)
        while not os.path.exists("go"):
            try:
                if self.connection.recv(1) == b"":
                    print("client left", flush=True)
                    break
            except TimeoutError:
                continue
        else:
            self.wfile.write(b"second")
        self.close_connection = True
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024
server = Server(("127.0.0.1", int(os.environ["PORT"])), Handler)
print("ready", flush=True)
server.serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def fetch(url: str, path: str = "/", token: str | None = TOKEN) -> tuple[int, str]:
    """Status and body of a GET."""
    request = urllib.request.Request(
        url + path, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_exposed_port(api):
    port = free_port()
    job_id = api.start(
        "--expose", str(port), "-e", f"PORT={port}", "image", "python3", "-c", STREAMER
    )
    [url] = api.job(job_id)["status"]["exposeUrls"]
    api.logged(job_id, "ready")

    for token in (None, "wrong", TOKEN + "x", ""):
        assert fetch(url, "/hello", token)[0] == 401
    assert fetch(url, "/hello") == (200, "/hello")

    host = url.removeprefix("http://")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    for size in (10, 3_000_000):  # one connection, kept alive; a large body goes both ways
        connection.request("POST", "/", body=b"x" * size, headers=headers)
        assert len(connection.getresponse().read()) == size
    connection.close()

    for leave in (True, False):
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("GET", "/stream", headers=headers)
        answer = connection.getresponse()
        assert answer.read(6) == b"first,"  # before the answer is complete
        if leave:
            answer.close()
            connection.close()
            api.logged(job_id, "client left")
        else:
            (api.state / "jobs" / job_id / "work/go").touch()
            assert answer.read() == b"second"
            connection.close()

    async def many() -> list[tuple[bytes, asyncio.StreamWriter]]:
        async def one(number: int) -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(
                f"GET /n{number}. HTTP/1.1\r\nHost: x\r\n"
                f"authorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            answer = await reader.readuntil(f"/n{number}.".encode())
            return answer, writer  # stays open, so that all are at the same time

        return await asyncio.wait_for(asyncio.gather(*map(one, range(400))), DEADLINE_S)

    assert all(answer.startswith(b"HTTP/1.1 200") for answer, _ in asyncio.run(many()))

    api.cancel(job_id)
    api.ended(job_id)
    with pytest.raises(urllib.error.URLError):
        fetch(url)


def test_exposed_port_without_a_listener_and_public_port(api):
    port = free_port()
    job_id = api.start(
        "--expose", str(port), "--expose-public", str(port + 1), "image", "sleep", "60"
    )
    gated, public = api.job(job_id)["status"]["exposeUrls"]
    assert fetch(gated)[0] == 503
    assert fetch(gated, token=None)[0] == 401
    assert fetch(public, token=None)[0] == 503
    api.cancel(job_id)


def test_replicas_with_the_same_port(api):
    command = ("vllm", "serve", "model", "--port", "8000")
    jobs = [api.submit(*command, flavor="h200", expose={"ports": [8000]}) for _ in range(2)]
    for job_id in jobs:
        [url] = api.job(job_id)["status"]["exposeUrls"]
        api.logged(job_id, "vllm serve model --port 8000")
        status, body = until(
            lambda url=url: (got := fetch(url))[0] != 503 and got, "vllm to listen"
        )
        assert status == 200 and "Directory listing" in body
    running = json.loads(api.hf("jobs", "list", "--json", "--status", "running"))
    assert set(jobs) <= {job["id"] for job in running}
    for job_id in jobs:
        api.cancel(job_id)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"command": []}, "command must be a list of strings"),
        ({"command": "true"}, "command must be a list"),
        ({"environment": {"A": 1}}, "environment must map strings to strings"),
        ({"timeoutSeconds": -1}, "timeoutSeconds must be positive"),
        ({"expose": {"ports": [70000]}}, "Invalid ports to expose"),
        (
            {"volumes": [{"type": "bucket", "source": "local/lora/..", "mountPath": "/mnt/x"}]},
            "Invalid bucket id",
        ),
        (
            {"volumes": [{"type": "bucket", "source": "local/lora", "mountPath": "mnt/x"}]},
            "not an absolute mount path",
        ),
        (
            {
                "volumes": [
                    {"type": "bucket", "source": "local/lora", "mountPath": "/m", "path": "no"}
                ]
            },
            "no folder 'no'",
        ),
        (
            {"volumes": [{"type": "bucket", "source": "local/lora", "mountPath": "/proc/x/y"}]},
            "No such file",
        ),
    ],
)
def test_bad_payloads(api, change, expected):
    status, body = api.post(
        "/api/jobs/local", {"dockerImage": "i", "flavor": "h200", "command": ["true"], **change}
    )
    assert status == 400 and expected in body["error"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--flavor", "h9000", "image", "true"], "Invalid flavor h9000"),
        (["--label", "run=a b", "image", "true"], "Invalid label run=a b"),
        (["-v", "hf://buckets/local/nowhere:/mnt/x", "image", "true"], "no bucket local/nowhere"),
        (["-v", "hf://buckets/local/lora:/etc", "image", "true"], "/etc exists and is no link to"),
        (
            ["-v", "hf://datasets/org/name:/mnt/x", "image", "true"],
            "Only bucket volumes can be mounted here",
        ),
        (["-v", f"{ROOT}/tests:/mnt/x", "image", "true"], "need the Xet protocol"),
    ],
)
def test_bad_requests(api, args, expected):
    before = len(api.get("/api/jobs/local"))
    message = api.hf("jobs", "run", "--detach", *args, code=1)
    assert "Bad request" in message and expected in message
    assert len(api.get("/api/jobs/local")) == before


def test_refusals_as_the_cli_prints_them(api):
    assert "Job Not Found" in api.hf("jobs", "inspect", "0" * 24, code=1)
    assert "Job Not Found" in api.hf("jobs", "cancel", "0" * 24, code=1)
    assert "Bucket 'local/nowhere' not found" in api.hf("buckets", "info", "local/nowhere", code=1)
    assert "You already created this bucket" in api.hf("buckets", "create", "local/lora", code=1)
    assert "403 Forbidden" in api.hf("buckets", "create", "someone/else", code=1)
    refused = api.hf("jobs", "run", "--detach", "image", "true", token="readonly-token", code=1)
    assert "403 Forbidden" in refused and "does not have sufficient permissions" in refused
    assert "h200x2" in api.hf("jobs", "hardware", token="readonly-token")
    assert "Not logged in" in api.hf("jobs", "run", "image", "true", token=None, code=1)
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic abc"}):
        request = urllib.request.Request(f"{api.url}/api/whoami-v2", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=DEADLINE_S)


def test_hardware_prices(api):
    rows = {row["name"]: row for row in json.loads(api.hf("jobs", "hardware", "--json"))}
    prices = {name: row["cost/hour"] for name, row in rows.items()}
    assert (prices["cpu-basic"], prices["h200"], prices["h200x2"]) == ("$0.01", "$5.00", "$10.00")


def test_max_jobs_is_a_credit(tmp_path):
    with stand_in(tmp_path / "state", "--max-jobs", "1", "--grace", "0") as server:
        first = server.submit("sleep", "60")
        refused = server.hf("jobs", "run", "--detach", "image", "true", code=1)
        assert "402 Payment Required" in refused and "credit balance is insufficient" in refused
        server.cancel(first)
        server.ended(first)
        assert server.ended(server.submit("true"))["status"]["stage"] == "COMPLETED"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_jobs_die_with_the_stand_in(tmp_path, signum):
    mount = tmp_path / "lora"
    server = StandIn(tmp_path / "state", "--grace", "0.3")
    (tmp_path / "state/buckets/local/lora").mkdir(parents=True)
    volume = {"type": "bucket", "source": "local/lora", "mountPath": str(mount)}
    job_id = server.submit("sh", "-c", FAMILY + "wait", volumes=[volume])
    pids = family(server, job_id)
    assert mount.is_symlink()
    code = server.stop(signum)
    assert not any(map(alive, pids)) and not os.path.lexists(mount)
    if signum == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 0
        assert (
            json.loads((server.state / "jobs" / job_id / "job.json").read_text())["status"]["stage"]
            == "CANCELED"
        )


def test_port_in_use(api, tmp_path):
    command = [
        sys.executable,
        ROOT / "local/jobs_api.py",
        "--state",
        tmp_path,
        "--port",
        api.url.rpartition(":")[2],
    ]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (
        result.returncode == 1
        and result.stderr.startswith("[jobs] cannot listen: ")
        and result.stdout == ""
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")
def test_reader_buckets_show_another_tree_at_the_same_path(tmp_path):
    mount, lagging = tmp_path / "lora", tmp_path / "lagging"
    with stand_in(
        tmp_path / "state", "--buckets", str(tmp_path / "hub"), "--reader-buckets", str(lagging)
    ) as server:
        server.hf("buckets", "create", "local/lora")
        volume = ["-v", f"hf://buckets/local/lora:{mount}"]
        (lagging / "local/lora").mkdir(parents=True)
        (lagging / "local/lora/version").write_text("old\n")
        wait = f"while ! grep -q new {mount}/version; do sleep 0.05; done"
        reader = server.start(
            "-v", volume[1] + ":ro", "image",
            "sh", "-c", f"cat {mount}/version; touch {mount}/x || echo denied; echo ready; {wait}; "
            f"cat {mount}/version",
        )  # fmt: skip
        server.logged(reader, "ready")
        writer = server.start(
            *volume, "image", "sh", "-c", f"echo new > {mount}/version; ls {mount}; exit 7"
        )
        assert server.ended(writer)["status"]["message"] == "Job failed with exit code: 7"
        assert (tmp_path / "hub/local/lora/version").read_text() == "new\n" and list(
            mount.iterdir()
        ) == []
        assert server.job(reader)["status"]["stage"] == "RUNNING"  # does not see it yet
        (lagging / "local/lora/version").write_text("new\n")  # the mirror catches up
        assert server.ended(reader)["status"]["stage"] == "COMPLETED"
        lines = server.log(reader)
        assert lines[1] == "old" and "denied" in lines and lines[-1] == "new"
    assert not mount.exists()
