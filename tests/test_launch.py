"""launch.sh and serve.sh, with the real `hf` CLI, the Jobs API stand-in, proxy.py, and fakes of
vLLM and the trainer.

python -m pytest tests/test_launch.py        # eight minutes
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from test_jobs_api import BIN, TOKEN, StandIn, free_port

ROOT = Path(__file__).resolve().parents[1]
FAKES = ROOT / "tests/fake_job"
SCRIPTS = ("launch.sh", "serve.sh", "proxy.py", "train.py", "requirements.txt")
SYSTEM = "/usr/local/bin:/usr/bin:/bin"
DEADLINE_S = 90  # for anything a test waits for: `hf` takes a second per call on a busy machine
ENDED = ("COMPLETED", "CANCELED", "ERROR")


def until(condition, what: str, seen=lambda: ""):
    """Poll `condition` until it is truthy and return its value; fail after DEADLINE_S, showing what
    is `seen`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}\n{seen()}"
        time.sleep(0.1)
    return value


def copy_of_scripts(folder: Path) -> Path:
    """The project's scripts in `folder`, with nothing to install."""
    (folder / "bench").mkdir(parents=True)
    for name in (*SCRIPTS, "bench/check.sh"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "bench/check.sh", folder)  # where the Jobs of --check look for it
    (folder / "requirements.txt").write_text("")
    return folder


class Launch:
    """A launch.sh that runs, as the leader of a process group; what it says goes to a file."""

    def __init__(self, arguments, env, log: Path, cwd="/"):
        self.log_path = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                arguments,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log_path.read_text()

    def says(self, text: str, times: int = 1):
        """Wait until it has said `text` so many times."""
        there = lambda: self.said.count(text) >= times
        until(lambda: there() or self.process.poll() is not None, repr(text), lambda: self.said)
        assert there(), f"no {text!r} in\n{self.said}"

    def ends(self, code: int) -> str:
        """Wait for its end, check its exit code and return what it has said."""
        try:
            assert self.process.wait(DEADLINE_S) == code, self.said
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.said}") from None
        assert TOKEN not in self.said
        return self.said

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


class Ground:
    """A copy of the scripts, a Jobs API stand-in whose Jobs find the fakes on their PATH, and
    launches from there."""

    def __init__(self, folder: Path, *options: str):
        self.folder, self.tree, self.launches = folder, copy_of_scripts(folder / "tree"), []
        self.api = StandIn(folder / "state", "--grace", "8", *options, path=str(FAKES))
        buckets = folder / "state/buckets/local"
        buckets.mkdir(parents=True)
        (buckets / "code").symlink_to(self.tree)
        self.bucket = buckets / "lora"
        self.env = {
            "PATH": f"{BIN}:{SYSTEM}",
            "HOME": str(folder),
            "HF_ENDPOINT": self.api.url,
            "HF_TOKEN": TOKEN,
        }
        self.env |= {
            "BUCKET": "local/lora",
            "MOUNT": str(folder / "lora"),
            "CODE_DIR": str(folder / "code"),
            "TRAIN_SCRIPT": str(FAKES / "train.py"),
        }
        self.env |= {"CODE_VOLUME": f"hf://buckets/local/code:{folder}/code:ro", "REPLICAS": "1"}
        self.env |= {"POLL_S": "3", "START_MINUTES": "2", "ATTEMPTS": "1"}

    def launch(self, *arguments: str, run: str, **env: str) -> Launch:
        port = env.get("PORT", str(free_port()))
        env = {"PORT": port, "REPLICA_URL": f"/exposed/ID/{port}"} | env
        env = self.env | {"RUN": run, "PROXY_PORT": str(free_port())} | env
        log = self.folder / f"{len(self.launches)}.log"
        self.launches.append(Launch([self.tree / "launch.sh", *arguments], env, log))
        self.launches[-1].proxy = f"http://127.0.0.1:{env['PROXY_PORT']}"
        return self.launches[-1]

    def jobs(self, run: str, role: str | None = None) -> list[dict]:
        """Records of the run's Jobs, oldest first."""
        label = f"label=run%3D{run}" + (f"&label=role%3D{role}" if role else "")
        return self.api.get(f"/api/jobs/local?{label}")[::-1]

    def stages(self, run: str) -> list[tuple[str, str]]:
        return [(job["labels"]["role"], job["status"]["stage"]) for job in self.jobs(run)]

    def all_ended(self, run: str) -> list[tuple[str, str]]:
        """(role, stage) of the run's Jobs, all of which have to have ended by now, or to be about
        to."""
        until(
            lambda: all(stage in ENDED for _, stage in self.stages(run)),
            f"the end of {run}",
            lambda: self.stages(run),
        )
        return self.stages(run)

    def order(self, run: str, code: int):
        """Tell the run's fake trainer to end with this exit code, now or as soon as it runs."""
        (self.bucket / run).mkdir(parents=True, exist_ok=True)
        (self.bucket / run / "part").write_text(str(code))
        (self.bucket / run / "part").rename(self.bucket / run / "order")

    def close(self):
        for launch in self.launches:
            launch.kill()
        self.api.stop()


@contextlib.contextmanager
def a_ground(folder: Path, *options: str):
    ground = Ground(folder, *options)
    try:
        yield ground
    finally:
        ground.close()


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    with a_ground(tmp_path_factory.mktemp("ground")) as ground:
        yield ground


def processes(setting: str) -> list[int]:
    """Those that have `NAME=value` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def words_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def bash(*arguments, env: dict, timeout=DEADLINE_S) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *arguments],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


# ---- What would be submitted


def dry_run(tree: Path = ROOT, **env: str) -> tuple[list[list[str]], str]:
    """The commands that --dry-run prints, in words, and what else it says. It has no network and no
    `hf`."""
    setting = {"PATH": "/usr/bin:/bin", "RUN": "dry", "BUCKET": "me/lora"}
    done = bash(tree / "launch.sh", "--dry-run", env=setting | env)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    lines = done.stdout.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("[launch]")]
    return commands, "\n".join(line for line in lines if line.startswith("[launch]"))


def volume(spec: str) -> dict:
    source, target, *mode = spec.removeprefix("hf://buckets/").split(":")
    return {"type": "bucket", "source": source, "mountPath": target} | (
        {"readOnly": True} if mode == ["ro"] else {}
    )


def job_of(words: list[str]) -> dict:
    """What `hf jobs run ...` asks the Jobs API for."""
    split = words.index("--")
    parser = argparse.ArgumentParser()
    for flag in ("--detach", "--quiet"):
        parser.add_argument(flag, action="store_true", required=True)
    for flag in (
        "--flavor",
        "--timeout",
        "--attempts",
        "--network-group",
        "--network-alias",
        "--expose",
        "--secrets",
        "--namespace",
    ):
        parser.add_argument(flag)
    for flag in ("--label", "--volume", "--env"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("image")
    assert words[:3] == ["hf", "jobs", "run"]
    args = parser.parse_args(words[3:split])
    pairs = lambda values: dict(value.split("=", 1) for value in values)
    return {
        "flavor": args.flavor,
        "timeoutSeconds": int(args.timeout.removesuffix("h")) * 3600,
        "retry": int(args.attempts or 1) - 1,
        "labels": pairs(args.label),
        "environment": pairs(args.env),
        "secrets": {args.secrets: "***"} if args.secrets else {},
        "volumes": [volume(spec) for spec in args.volume],
        "expose": [int(args.expose)] if args.expose else [],
        "dockerImage": args.image,
        "command": words[split + 1 :],
        "network": args.network_group
        and {"group": args.network_group, "aliases": [args.network_alias]},
    }


def planned(commands: list[list[str]]) -> tuple[list[dict], dict]:
    """(replicas, trainer) among the commands."""
    jobs = [job_of(words) for words in commands if words[:3] == ["hf", "jobs", "run"]]
    roles = [job["labels"]["role"] for job in jobs]
    assert roles == ["trainer"] + ["replica"] * (len(jobs) - 1)
    return jobs[1:], jobs[0]


def flag(job: dict, name: str) -> str:
    return job["command"][job["command"].index(name) + 1]


def test_the_default_run():
    commands, said = dry_run()
    assert said.splitlines() == [
        "[launch] dry: 500 steps, 3 x h200 + h200x2 ($25 per hour)",
        "[launch] this Job then starts its replicas:",
    ]
    create = "hf buckets create me/lora --private --exist-ok --quiet"
    assert commands[0] == ["timeout", "120", *create.split()]
    staged = ["train.py", "proxy.py", "serve.sh", "launch.sh", "requirements.txt"]
    assert commands[1:3] == [["mkdir", "-p", ".local/code-dry"], ["cp", *staged, ".local/code-dry"]]
    replicas, trainer = planned(commands)
    serve = (
        "vllm serve Qwen/Qwen2.5-Math-1.5B --host 0.0.0.0 --port 8000 --dtype bfloat16 "
        "--max-model-len 4096 --logprobs-mode processed_logprobs --generation-config vllm "
        "--enable-lora --max-lora-rank 1 --max-loras 6"
    )
    for slot, replica in enumerate(replicas, 1):
        assert replica["command"] == [*serve.split(), "--seed", str(slot)]
        assert replica["environment"] == {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        assert replica["labels"] == {"run": "dry", "role": "replica", "slot": str(slot)}
        assert replica["volumes"] == [volume("me/lora:/lora:ro")] and replica["expose"] == [8000]
        assert replica["flavor"] == "h200" and replica["secrets"] == {"HF_TOKEN": "***"}
        assert replica["retry"] == 2
    assert trainer["command"] == ["bash", "/code/launch.sh", "trainer"] and trainer["secrets"] == {
        "HF_TOKEN": "***"
    }
    assert trainer["volumes"] == [volume("me/lora:/lora"), volume("./.local/code-dry:/code:ro")]
    assert trainer["flavor"] == "h200x2" and trainer["retry"] == 2 and trainer["expose"] == []
    assert {job["dockerImage"] for job in (*replicas, trainer)} == {"vllm/vllm-openai:v0.27.1"}
    assert {job["timeoutSeconds"] for job in (*replicas, trainer)} == {6 * 3600}
    assert not (ROOT / ".local/code-dry").exists()  # nothing was done


@pytest.mark.parametrize(
    ("change", "serving", "training", "replicas"),
    [
        ({"MODEL": "org/other"}, {"serve": "org/other"}, {"MODEL": "org/other"}, 3),
        ({"DATASET": "org/sums"}, {}, {"DATASET": "org/sums"}, 3),
        ({"EVAL_DATASET": ""}, {}, {"EVAL_DATASET": ""}, 3),
        ({"LORA_RANK": "16"}, {"--max-lora-rank": "16"}, {"LORA_RANK": "16"}, 3),
        ({"LORA_RANK": "20"}, {"--max-lora-rank": "32"}, {"LORA_RANK": "20"}, 3),
        ({"LORA_RANK": "512"}, {"--max-lora-rank": "512"}, {"LORA_RANK": "512"}, 3),
        ({"MAX_STALENESS": "8"}, {"--max-loras": "10"}, {"MAX_STALENESS": "8"}, 3),
        ({"MAX_STALENESS": "0"}, {"--max-loras": "2"}, {"MAX_STALENESS": "0"}, 3),
        ({"REPLICAS": "6"}, {}, {"REPLICAS": "6"}, 6),
        ({"REPLICAS": "1", "TRAINER_FLAVOR": "h200"}, {}, {"REPLICAS": "1"}, 1),
        ({"CONTEXT": "8192"}, {"--max-model-len": "8192"}, {"CONTEXT": "8192"}, 3),
        ({"MAX_STEPS": "7"}, {}, {"MAX_STEPS": "7"}, 3),
        ({"MOUNT": "/mnt/lora"}, {}, {"MOUNT": "/mnt/lora"}, 3),
    ],
)  # fmt: skip
def test_change_one_thing(change, serving, training, replicas):
    """Each Job gets the changed constant, and nothing else changes."""
    _, before = planned(dry_run(BUCKET="me/lora")[0])
    jobs, trainer = planned(dry_run(BUCKET="me/lora", **change)[0])
    assert len(jobs) == replicas
    assert [flag(job, "--seed") for job in jobs] == [job["labels"]["slot"] for job in jobs]
    assert len({flag(job, "--seed") for job in jobs}) == replicas
    for name, value in serving.items():
        assert {flag(job, name) for job in jobs} == {value}
    assert trainer["environment"] == before["environment"] | training
    assert all(job["volumes"][0]["mountPath"] == trainer["volumes"][0]["mountPath"] for job in jobs)
    if "TRAINER_FLAVOR" in change:
        assert (
            trainer["flavor"] == "h200" and "$10 per hour" in dry_run(BUCKET="me/lora", **change)[1]
        )


def test_network_group_in_a_dry_run():
    jobs, trainer = planned(dry_run(BUCKET="me/lora", NETWORK_GROUP="1")[0])
    assert [job["network"] for job in jobs] == [
        {"group": "dry", "aliases": [f"replica-{n}"]} for n in (1, 2, 3)
    ]
    assert trainer["network"] == {"group": "dry", "aliases": ["trainer"]}
    assert (
        all(job["expose"] == [] for job in (*jobs, trainer))
        and trainer["environment"]["NETWORK_GROUP"] == "1"
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"CONTEXT": "3000"},
            "MAX_COMPLETION=3000 in train.py leaves no room for a prompt: CONTEXT=3000",
        ),
        ({"CONTEXT": "20000"}, "TOKEN_BUDGET=16384 in train.py is below CONTEXT=20000"),
        ({"BUCKET": ""}, "BUCKET='': user/name is expected, or REPLICA_URLS=http://"),
        ({"LORA_RANK": "513"}, "LORA_RANK=513: vLLM takes at most 512"),
        ({"LORA_RANK": "0"}, "LORA_RANK=0: a whole number above 0"),
        ({"MAX_STALENESS": "-1"}, "MAX_STALENESS=-1: a whole number"),
        ({"REPLICAS": "none"}, "REPLICAS=none: a whole number above 0"),
        ({"RUN": "my run"}, "RUN=my run: at most 100 letters, digits, - and _"),
    ],
)
def test_inconsistent_constants(env, message):
    done = bash(ROOT / "launch.sh", "--dry-run", env={"PATH": "/usr/bin:/bin", "RUN": "dry"} | env)
    assert done.returncode == 1 and message in done.stderr and "hf" not in done.stdout


def test_longer_context_with_longer_rows(tmp_path):
    tree = copy_of_scripts(tmp_path / "tree")
    source = (tree / "train.py").read_text()
    for old, new in (
        ("MAX_COMPLETION = 3000", "MAX_COMPLETION = 20000"),
        ("TOKEN_BUDGET = 16384", "TOKEN_BUDGET = 32768"),
    ):
        assert old in source
        source = source.replace(old, new)
    (tree / "train.py").write_text(source)
    jobs, trainer = planned(dry_run(tree, CONTEXT="24576")[0])
    assert flag(jobs[0], "--max-model-len") == trainer["environment"]["CONTEXT"] == "24576"


def test_usage():
    done = bash(ROOT / "launch.sh", "--halp", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "./launch.sh --local" in done.stderr and done.stdout == ""
    done = bash(ROOT / "launch.sh", "--stop", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1 and "which run? RUN=... ./launch.sh --stop" in done.stderr
    for words in (("--stop", "--dry-run"), ("--dry-run", "--stop"), ("--detach", "--dry-run")):
        done = bash(ROOT / "launch.sh", *words, env={"PATH": "/usr/bin:/bin", "RUN": "dry"})
        assert done.returncode == 2 and "./launch.sh --local" in done.stderr


# ---- A run


def test_a_run_is_what_the_dry_run_printed(ground, tmp_path):
    """Submitted as printed, followed to its end, nothing left; no argument list and no output has
    the token."""
    env = {"REPLICAS": "2", "MAX_STEPS": "9", "MAX_STALENESS": "3", "LORA_RANK": "4"}
    env |= {"EVAL_DATASET": "", "ATTEMPTS": "2", "PORT": "8000", "PROXY_PORT": str(free_port())}
    env |= {"REPLICA_URL": "/exposed/ID/8000"}
    path = shutil.which("hf", path=ground.env["PATH"])
    (tmp_path / "hf").write_text(f'#!/bin/sh\necho hf "$@" >>{tmp_path}/called\nexec {path} "$@"\n')
    (tmp_path / "hf").chmod(0o755)
    launch = ground.launch(run="happy", PATH=f"{tmp_path}:{ground.env['PATH']}", **env)
    launch.says("training on")
    everywhere = [words_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
    assert not any(TOKEN.encode() in word for words in everywhere for word in words)
    ground.order("happy", 0)
    said = launch.ends(0)
    called = (tmp_path / "called").read_text()
    assert "hf jobs run" in called and TOKEN not in called

    printed = ground.env | env | {"RUN": "happy", "PATH": "/usr/bin:/bin"}
    replicas, trainer = planned(dry_run(ground.tree, **printed)[0])
    assert ground.bucket.is_dir()
    for wanted, job in zip((trainer, *replicas), ground.jobs("happy"), strict=True):
        job["labels"].pop("name")  # `hf` makes one up
        job["expose"] = job.get("expose", {}).get("ports", [])
        assert {name: job.get(name) for name in wanted} == wanted

    assert "9 steps, 2 x h200 + h200x2 (local and free; on Hugging Face $20 per hour)" in said
    in_order = ["] trainer: Job", "[train] checked, with the token", "] replica 1: Job"]
    in_order += ["] replica 2: Job", "the replicas are ready", "torchrun --nproc-per-node gpu "]
    places = [said.index(text) for text in in_order]
    assert places == sorted(places)
    seen = json.loads(said.split("trainer's environment: ")[1].splitlines()[0])
    wanted = {"MAX_STEPS": "9", "MAX_STALENESS": "3", "LORA_RANK": "4", "EVAL_DATASET": ""}
    wanted |= {"RUN": "happy", "TRACKIO_SPACE_ID": "local/async-grpo-lora"}
    assert seen == seen | wanted and seen["MOUNT"] == ground.env["MOUNT"]
    assert "[launch] completed: scoreboard, checkpoints and adapter are in hf://buckets/" in said
    assert ground.stages("happy") == [("trainer", "COMPLETED")] + [("replica", "CANCELED")] * 2
    for job in ground.jobs("happy"):
        assert TOKEN not in "\n".join(ground.api.log(job["id"]))


def kill_job(job: dict):
    """SIGKILL to all of its processes, as when its machine is preempted. They are stopped first,
    because a machine's processes end at once: none of them acts on another one's end."""
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes(f"JOB_ID={job['id']}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def in_service(launch: Launch) -> set[str]:
    """URLs of the replicas that the run's proxy has in service."""
    try:
        with urllib.request.urlopen(f"{launch.proxy}/stats", timeout=30) as answer:
            replicas = json.load(answer)["replicas"]
    except OSError:
        return set()
    return {replica["url"] for replica in replicas if replica["state"] == "ready"}


def served_by(launch: Launch) -> str:
    """URL of the replica that answers a request with a prompt of its own."""
    prompt = [time.monotonic_ns()] * 40
    body = {"model": "Qwen/Qwen2.5-Math-1.5B", "prompt": prompt, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{launch.proxy}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.headers["X-Replica"]


def test_a_run_outlives_its_terminal_its_trainer_and_its_replicas(ground):
    launch = ground.launch(run="life", REPLICAS="2", ATTEMPTS="3")
    launch.says("training on")
    urls = in_service(launch)
    assert len(urls) == 2
    os.kill(launch.process.pid, signal.SIGHUP)  # the terminal is closed
    assert "cancelling" not in launch.ends(129)
    trainer, *replicas = before = ground.jobs("life")
    assert [job["status"]["stage"] for job in before] == ["RUNNING"] * 3

    kill_job(trainer)  # its next attempt adopts the replicas
    log = lambda text: sum(text in line for line in ground.api.log(trainer["id"]))
    until(lambda: log("training on") == 2, "the second attempt")
    assert [job["id"] for job in ground.jobs("life")] == [job["id"] for job in before]
    assert [job["status"]["stage"] for job in ground.jobs("life")] == ["RUNNING"] * 3

    kill_job(replicas[0])  # it starts again under its id, so at its address, and serves the run
    again = lambda: sum("vllm serve" in line for line in ground.api.log(replicas[0]["id"])) == 2
    until(again, "its second attempt")
    [url] = [url for url in urls if replicas[0]["id"] in url]
    until(lambda: served_by(launch) == url, "the replica to answer a request of the run")
    assert in_service(launch) == urls and log("has ended") == 0

    env = ground.env | {"RUN": "life"}
    attached = Launch([ground.tree / "launch.sh", "--attach"], env, ground.folder / "attached")
    ground.launches.append(attached)
    attached.says("training on", times=2)
    ground.api.cancel(replicas[0]["id"])  # it ends for good
    attached.says(
        f"replica 1 has ended; above is the end of its log: hf jobs logs {replicas[0]['id']}"
    )
    until(lambda: len(in_service(launch)) == 1, "the run to go on with one")
    ground.order("life", 0)
    attached.ends(0)
    assert ground.all_ended("life") == [("trainer", "COMPLETED")] + [("replica", "CANCELED")] * 2


def test_a_trainer_that_fails_leaves_nothing_and_starts_anew(ground):
    launch = ground.launch(run="fails", ATTEMPTS="2")
    launch.says("training on")
    ground.order("fails", 3)
    launch.says("train.py failed, as it says above; RUN=")
    launch.says("training on", times=2)
    trainer, first, second = ground.jobs("fails")
    assert first["status"]["stage"] == "CANCELED" and second["status"]["stage"] == "RUNNING"
    ground.order("fails", 3)
    assert "the trainer's Job did not complete: hf jobs logs" in launch.ends(1)
    assert ground.stages("fails") == [("trainer", "ERROR")] + [("replica", "CANCELED")] * 2


def test_no_replica_is_left(ground):
    launch = ground.launch(run="none")
    launch.says("training on")
    ground.api.cancel(ground.jobs("none", "replica")[0]["id"])
    launch.says("[launch] 0 replicas are left, 1 needed")
    launch.ends(1)
    assert ground.stages("none") == [("trainer", "ERROR"), ("replica", "CANCELED")]


def test_a_check_that_fails_costs_no_replica(ground):
    said = ground.launch(run="refused", DATASET="missing").ends(1)
    assert "[train] there is no data set missing\n[launch] no replica is started, for the" in said
    assert ground.stages("refused") == [("trainer", "ERROR")]


@pytest.mark.parametrize("killed", ["launcher", "trainer", "launcher, trainer"])
@pytest.mark.parametrize("then", ["replica", "stop"])
def test_nothing_is_left_whatever_dies(ground, killed, then):
    """The launcher by SIGKILL, so that no trap runs, the trainer in its last attempt, a replica."""
    run = re.sub(r"\W+", "-", f"dies {killed} {then}")
    launch = ground.launch(run=run)
    launch.says("training on")
    trainer, replica = ground.jobs(run)
    if "launcher" in killed:
        launch.kill()
    if "trainer" in killed:
        kill_job(trainer)
    if then == "replica":
        kill_job(replica)
    if then == "stop" or killed == "launcher, trainer":  # --timeout alone would end the replica
        env = {name: ground.env[name] for name in ("PATH", "HOME", "HF_ENDPOINT", "HF_TOKEN")}
        stopped = bash(ground.tree / "launch.sh", "--stop", env=env | {"RUN": run})
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    elif killed == "trainer":
        assert "the trainer's Job did not complete" in launch.ends(1)
    roles = [role for role, stage in ground.all_ended(run)]
    assert roles == ["trainer", "replica"]


def test_stop_after_the_launcher_was_killed(ground, tmp_path):
    launch = ground.launch(run="killed")
    launch.says("[launch] replica 1: Job")
    launch.kill()  # no trap runs
    again = ground.launch(run="killed").ends(1)
    assert "run killed is going already" in again and "Job " not in again
    elsewhere = copy_of_scripts(tmp_path / "elsewhere")
    env = {name: ground.env[name] for name in ("PATH", "HOME", "HF_ENDPOINT", "HF_TOKEN")}
    stopped = bash(elsewhere / "launch.sh", "--stop", env=env | {"RUN": "killed"})
    assert stopped.returncode == 0 and "cancelling" in stopped.stdout, stopped.stderr
    assert ground.stages("killed") == [("trainer", "CANCELED"), ("replica", "CANCELED")]


def test_detached_and_then_cancelled_by_hand(ground):
    """No launcher is there: the trainer Job itself sees to the replicas."""
    said = ground.launch("--detach", run="alone").ends(0)
    assert "RUN=alone ./launch.sh --attach follows it, --stop ends it" in said
    [trainer] = ground.jobs("alone", "trainer")
    until(lambda: any("training on" in line for line in ground.api.log(trainer["id"])), "training")
    ground.api.cancel(trainer["id"])
    assert ground.all_ended("alone") == [("trainer", "CANCELED"), ("replica", "CANCELED")]
    attached = bash(ground.tree / "launch.sh", "--attach", env=ground.env | {"RUN": "alone"})
    assert attached.returncode == 1 and "training on" in attached.stdout
    assert f"the trainer's Job did not complete: hf jobs logs {trainer['id']}" in attached.stderr
    attached = bash(ground.tree / "launch.sh", "--attach", env=ground.env | {"RUN": "nobody"})
    assert attached.returncode == 1 and "no trainer's Job of run nobody is known" in attached.stderr


@pytest.mark.parametrize(
    ("signum", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)]
)
@pytest.mark.parametrize(
    "moment", ["h200x2 (", "] trainer: Job", "] replica 1: Job", "training on"]
)
def test_interrupted(ground, signum, to_all, code, moment):
    """Ctrl-C reaches `hf` as well, SIGTERM the launcher alone; at the bill, which is before the
    submission, and while the Job, its replicas and the training start."""
    run = re.sub(r"\W+", "-", f"signal-{signum}-{moment}")
    launch = ground.launch(run=run, REPLICAS="2")
    launch.says(moment)
    (os.killpg if to_all else os.kill)(launch.process.pid, signum)
    launch.ends(code)
    assert {stage for _, stage in ground.stages(run)} <= {"CANCELED"}
    time.sleep(2)  # nor does one appear that was being started
    assert {stage for _, stage in ground.stages(run)} <= {"CANCELED"}


def test_the_api_refuses_jobs_for_a_while(ground):
    refuse = ground.api.state / "refuse"
    launch = ground.launch(run="patient", REPLICAS="2", POLL_S="1")
    launch.says("] trainer: Job")
    refuse.touch()
    try:
        launch.says("503 Service Unavailable", times=3)
        launch.says("No Jobs are accepted at present", times=3)
    finally:
        refuse.unlink()
    launch.says("training on")
    ground.order("patient", 0)
    launch.ends(0)
    assert ground.stages("patient") == [("trainer", "COMPLETED")] + [("replica", "CANCELED")] * 2


def test_a_replica_is_refused_for_good(tmp_path):
    with a_ground(tmp_path, "--max-jobs", "2") as ground:
        said = ground.launch(run="poor", REPLICAS="2").ends(1)
        assert said.count("402 Payment Required") == 1 and "replica 2 is refused for the" in said
        assert ground.stages("poor") == [("trainer", "ERROR"), ("replica", "CANCELED")]


def test_an_organisation_is_billed(ground):
    """Its Jobs, its bucket, its dashboard; replicas included, which the trainer's Job starts."""
    env = {"BUCKET": "", "NAMESPACE": "lab", "MOUNT": str(ground.folder / "lab-lora")}
    launch = ground.launch(run="org", **env)
    launch.says("training on")
    label = "/api/jobs/lab?label=run%3Dorg"
    assert ground.jobs("org") == [] and len(ground.api.get(label)) == 2
    said = launch.said
    (ground.api.state / "buckets/lab/lora/org/order").write_text("0")
    launch.ends(0)
    assert '"TRACKIO_SPACE_ID": "lab/async-grpo-lora"' in said
    stages = [(job["labels"]["role"], job["status"]["stage"]) for job in ground.api.get(label)]
    assert stages == [("replica", "CANCELED"), ("trainer", "COMPLETED")]
    trainer = dry_run(NAMESPACE="lab", BUCKET="", NETWORK_GROUP="1")[0][3]
    assert trainer[trainer.index("--namespace") + 1] == "lab" and trainer.count("--namespace") == 1


def test_network_group(ground):
    """The aliases resolve to nothing here: what counts is that they are what the proxy is given."""
    launch = ground.launch(run="group", NETWORK_GROUP="1", REPLICA_URL="")
    launch.says(f"[proxy] {launch.proxy} in front of 1 replicas")
    trainer, replica = ground.jobs("group")
    port = flag(replica, "--port")
    [pid] = [p for p in processes(f"JOB_ID={trainer['id']}") if b"proxy.py" in words_of(p)]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"REPLICA_URLS=http://group-replica-1:{port}".encode() in environment
    assert replica["network"] == {"group": "group", "aliases": ["replica-1"]}
    assert trainer["network"] == {"group": "group", "aliases": ["trainer"]}
    assert "expose" not in replica and "expose" not in trainer
    os.killpg(launch.process.pid, signal.SIGINT)
    assert "cancelling" in launch.ends(130)
    assert ground.stages("group") == [("trainer", "CANCELED"), ("replica", "CANCELED")]


def test_check(ground):
    said = ground.launch("--check", run="ground").ends(0)
    assert "the exposed port answers 200 with the token and 401 without" in said
    for number in range(1, 6):
        assert f"[check] directory {number} was whole on the other mount after 0." in said
    jobs = ground.jobs("check-ground")
    assert [(job["labels"]["role"], job["flavor"]) for job in jobs] == [("probe", "cpu-basic")] * 2
    exposed = [job["expose"]["ports"] if "expose" in job else [] for job in jobs]
    assert exposed == [[int(jobs[0]["environment"]["PORT"])], []]
    assert [job["volumes"][1].get("readOnly", False) for job in jobs] == [True, False]
    assert all(stage in ENDED for _, stage in ground.stages("check-ground"))

    interrupted = ground.launch("--check", run="early")
    interrupted.says("[check] reader: Job")
    os.killpg(interrupted.process.pid, signal.SIGINT)
    interrupted.ends(130)
    assert {stage for _, stage in ground.all_ended("check-early")} == {"CANCELED"}

    env = ground.env | {"RUN": "x", "PATH": "/usr/bin:/bin"}
    printed = bash(ground.tree / "launch.sh", "--dry-run", "--check", env=env)
    assert printed.returncode == 0 and printed.stdout.count("hf jobs run") == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PATH": "/nowhere:/usr/bin:/bin"}, "pip install -U huggingface_hub"),
        ({"HF_TOKEN": ""}, "needed: pip install -U huggingface_hub, hf auth login"),
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "needed: pip install -U huggingface_hub, hf auth login",
        ),
        ({"HF_TOKEN": "readonly-0123"}, "the trainer's Job was refused, as hf says above"),
        ({"BUCKET": ""}, "BUCKET='': user/name is expected"),
        ({"BUCKET": "lora"}, "BUCKET='lora': user/name is"),
        ({"BUCKET": "someone/else"}, "bucket someone/else is not there and cannot be made"),
    ],
)
def test_what_is_refused_before_anything_is_paid_for(ground, env, message):
    said = ground.launch(run="early", **env).ends(1)
    assert message in said and ground.jobs("early") == []


# ---- Without Hugging Face


class Machine:
    """A plain machine: the scripts, the bucket mounted, no `hf`; and two replicas on others, which
    ask for a key."""

    KEY = "key-of-ours"

    def __init__(self, folder: Path):
        self.folder = folder
        self.tree = copy_of_scripts(folder / "tree")
        self.mount = folder / "lora"
        self.launches = []
        tools = folder / "bin"
        for directory in (self.mount / "own", tools):
            directory.mkdir(parents=True)
        (tools / "torchrun").symlink_to(FAKES / "torchrun")
        (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tools / "python3").chmod(0o755)
        self.port, ports = free_port(), (free_port(), free_port())
        self.env = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(folder),
            "MOUNT": str(self.mount),
            "RUN": "own",
        }
        self.env |= {"PROXY_PORT": str(self.port), "POLL_S": "1", "START_MINUTES": "2"}
        self.env |= {"TRAIN_SCRIPT": str(FAKES / "train.py")}
        self.env |= {"REPLICA_URLS": ",".join(f"http://127.0.0.1:{port}" for port in ports)}
        for port in ports:
            serve = [
                "serve",
                "Qwen/Qwen2.5-Math-1.5B",
                "--port",
                str(port),
                "--max-loras",
                "6",
                "--max-lora-rank",
                "1",
            ]
            self.start(
                [sys.executable, FAKES / "vllm", *serve],
                {"PATH": "/usr/bin:/bin", "FAKE_KEY": self.KEY},
            )

    def start(self, words, env) -> Launch:
        self.launches.append(Launch(words, env, self.folder / f"{len(self.launches)}.log"))
        return self.launches[-1]

    def trainer(self, **env: str) -> Launch:
        return self.start(
            [self.tree / "launch.sh", "trainer"], self.env | {"VLLM_API_KEY": self.KEY} | env
        )

    def order(self, code: int):
        (self.mount / "own/order").write_text(str(code))


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    for launch in machine.launches:
        launch.kill()


def test_replicas_of_ones_own(machine):
    machine.order(0)
    said = machine.trainer(HF_TOKEN=TOKEN).ends(0)  # the replicas refuse all keys but theirs
    assert said.count("in service") >= 2 and "torchrun --nproc-per-node gpu" in said
    assert f"training on {' '.join(sorted(machine.env['REPLICA_URLS'].split(',')))}" in said
    assert "[train] checked, with the token" in said  # a gated model must download here, too
    assert machine.KEY not in said and "replica 1: Job" not in said


class Listener:
    """A port that answers nobody and keeps what it hears."""

    def __init__(self):
        self.server, self.heard = socket.create_server(("127.0.0.1", 0)), b""
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                connection.settimeout(5)
                with connection, contextlib.suppress(OSError):
                    self.heard += connection.recv(65536) or b"nothing"


def test_a_replica_of_ones_own_hears_no_token_of_hugging_face(machine):
    """Plain HTTP to a machine that is not this one: no key is set, and TOKEN stays here."""
    listener = Listener()
    other = {"REPLICA_URLS": f"http://localhost:{listener.port}", "VLLM_API_KEY": ""}
    trainer = machine.trainer(HF_TOKEN=TOKEN, **other)
    until(lambda: b"GET /health" in listener.heard, "a health check", lambda: trainer.said)
    here = machine.trainer(
        HF_TOKEN=TOKEN,
        PROXY_PORT=str(free_port()),
        REPLICA_URLS=f"http://127.0.0.1:{listener.port}",
        VLLM_API_KEY="",
    )
    until(lambda: listener.heard.count(b"GET /health") >= 4, "more of them", lambda: here.said)
    assert TOKEN.encode() not in listener.heard and b"uthorization" not in listener.heard
    for launch in (trainer, here):
        launch.process.terminate()
        launch.ends(143)


def test_an_http_proxy_is_not_for_this_machine(machine):
    """A laboratory's http_proxy hears nothing, from launch.sh, the proxy or the trainer."""
    listener = Listener()
    proxies = {
        name: f"http://127.0.0.1:{listener.port}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy")
    }
    machine.order(0)
    said = machine.trainer(**proxies, NO_PROXY="lab.example").ends(0)
    assert "training on" in said and listener.heard == b""
    assert '"no_proxy": "127.0.0.1,localhost,lab.example"' in said


def test_replicas_of_ones_own_with_another_key(machine):
    trainer = machine.trainer(VLLM_API_KEY="another")
    trainer.says("401")
    trainer.process.terminate()  # it would wait for two minutes
    assert "torchrun" not in trainer.ends(143)
    with pytest.raises(ConnectionRefusedError):  # the proxy has ended, too
        socket.create_connection(("127.0.0.1", machine.port))


def test_each_part_of_the_trainer_names_itself_when_it_fails(machine):
    machine.order(5)
    assert "train.py failed, as it says above; RUN=" in machine.trainer().ends(1)
    trainer = machine.trainer()
    trainer.says("training on")
    started = processes(f"PROXY_PORT={machine.port}")
    os.kill(next(pid for pid in started if b"proxy.py" in words_of(pid)), signal.SIGKILL)
    assert "[launch] proxy.py has ended: its error is above" in trainer.ends(1)
    with socket.create_server(("127.0.0.1", machine.port)):
        taken = f"[launch] PROXY_PORT={machine.port} is in use"
        assert taken in machine.trainer().ends(1)
    said = machine.trainer(REPLICA_URLS="http://127.0.0.1:9:9").ends(1)
    assert "[proxy] REPLICA_URLS=" in said and "[launch] proxy.py has ended" in said
    said = machine.trainer(DATASET="missing").ends(1)
    assert "no data set missing" in said and "[launch] no replica is started" in said
    (machine.mount / "full").write_text("a file where the run's directory should be made")
    for env in ({"RUN": "full"}, {"MOUNT": "/nowhere"}):
        assert "the bucket is expected there, mounted read-write" in machine.trainer(**env).ends(1)
    assert "user/name is expected, or REPLICA_URLS=http" in machine.trainer(REPLICA_URLS="").ends(1)
    assert "leaves no room for a prompt: CONTEXT=2000" in machine.trainer(CONTEXT="2000").ends(1)
    (machine.tree / "requirements.txt").write_text("./nothing.whl\n")
    said = machine.trainer().ends(1)
    assert said.count("ERROR: ") >= 3 and "[launch] pip failed three times" in said


def test_replicas_that_never_answer(machine):
    """The deadline is a minute."""
    trainer = machine.trainer(REPLICA_URLS="http://127.0.0.1:9", START_MINUTES="1")
    assert "[launch] not ready in 1 min, see [proxy]" in trainer.ends(1)


def test_the_trainer_in_docker(machine):
    """One line on a bare GPU machine; then the body that it starts, right here."""
    docker = machine.folder / "bin/docker"
    docker.write_text(
        f'#!/bin/sh\nprintf "%s\\0" docker "$@" >{machine.folder}/words\n'
        'while [ "$1" != --entrypoint ]; do shift; done\nshift 3\nexec bash "$@"\n'
    )
    docker.chmod(0o755)
    keys = {"HF_TOKEN": TOKEN, "VLLM_API_KEY": machine.KEY}
    machine.order(0)
    launch = machine.start([machine.tree / "launch.sh", "docker"], machine.env | keys)
    assert "training on" in launch.ends(0)
    words = (machine.folder / "words").read_text().split("\0")[:-1]
    gpus = "docker run --rm --gpus all --ipc host --network host --workdir"
    assert words[:11] == [*gpus.split(), str(machine.tree)]
    volumes = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    assert volumes == [
        f"{machine.mount}:{machine.mount}:rslave",
        f"{machine.tree}:{machine.tree}",
        f"{machine.folder}/.cache/huggingface:/root/.cache/huggingface",
    ]
    names = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    assert {"RUN", "MODEL", "REPLICA_URLS", "HF_TOKEN", "VLLM_API_KEY"} <= {*names}
    assert not any("=" in name for name in names)
    assert words[-5:] == [
        "--entrypoint",
        "bash",
        "vllm/vllm-openai:v0.27.1",
        "launch.sh",
        "trainer",
    ]
    assert not any(TOKEN in word or machine.KEY in word for word in words)

    printed = bash(machine.tree / "launch.sh", "--dry-run", "docker", env=machine.env | keys)
    assert shlex.split(printed.stdout) == words
    nobody = machine.env | {"REPLICA_URLS": ""}
    refused = bash(machine.tree / "launch.sh", "docker", env=nobody)
    assert refused.returncode == 1 and "or REPLICA_URLS=http://... of replicas" in refused.stderr


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("16_384", "TOKEN_BUDGET=16384"),
        ("5 * 1024  # tokens", "TOKEN_BUDGET=5120"),
        ("4 * (1024 + 256)", "TOKEN_BUDGET=5120"),
        ("2 ** 13", "TOKEN_BUDGET=8192"),
        (
            "16e3",
            "TOKEN_BUDGET = NUMBER is expected (digits, _, +, * and parentheses), found '16e3",
        ),
        ("int(16e3)", "found 'int(16e3)'"),
        ("$(touch /x)", "found '$(touch /x)'"),
    ],
)
def test_numbers_of_train_py(tmp_path, written, found):
    tree = copy_of_scripts(tmp_path / "tree")
    source = re.sub(r"(?m)^TOKEN_BUDGET = .*", "TOKEN_BUDGET = @", (tree / "train.py").read_text())
    (tree / "train.py").write_text(source.replace("@", written))
    env = {"PATH": "/usr/bin:/bin", "BUCKET": "me/lora", "CONTEXT": "20000"}
    done = bash(tree / "launch.sh", "--dry-run", env=env)
    assert done.returncode == 1 and found in done.stderr and "hf" not in done.stdout


def serve(
    *arguments: str, folder: Path, **env: str
) -> tuple[list[str], dict, subprocess.CompletedProcess]:
    """Run serve.sh with a `docker` and a `vllm` on the PATH that write down their words and their
    environment."""
    for program in ("docker", "vllm"):
        (folder / program).write_text(
            f'#!/bin/sh\nprintf "%s\\0" {program} "$@" >{folder}/words; env -0 >{folder}/env\n'
        )
        (folder / program).chmod(0o755)
    done = bash(
        ROOT / "launch.sh",
        "serve",
        *arguments,
        env={"PATH": f"{folder}:/usr/bin:/bin", "MOUNT": str(folder), "HOME": str(folder)} | env,
    )
    if not (folder / "words").exists():
        return [], {}, done
    words, environment = ((folder / name).read_text().split("\0")[:-1] for name in ("words", "env"))
    return words, dict(line.split("=", 1) for line in environment), done


FLAGS = """--dtype bfloat16 --max-model-len 4096 --logprobs-mode processed_logprobs
--generation-config vllm --enable-lora --max-lora-rank 1 --max-loras 6 --seed 1""".split()
SETTINGS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


def test_serve_in_docker(tmp_path):
    words, _, done = serve("docker", folder=tmp_path, SEED="1")
    assert done.returncode == 0, done.stderr
    expected = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--network", "host"]
    expected += [
        "--volume",
        f"{tmp_path}:{tmp_path}:ro,rslave",
        "--volume",
        f"{tmp_path}/.cache/huggingface:/root/.cache/huggingface",
        "--env",
        "HF_TOKEN",
        "--env",
        "VLLM_API_KEY",
        *(f"--env={k}={v}" for k, v in SETTINGS.items()),
    ]
    image = ["--entrypoint", "vllm", "vllm/vllm-openai:v0.27.1", "serve", "Qwen/Qwen2.5-Math-1.5B"]
    # nobody else reaches it
    assert words == [*expected, *image, "--host", "127.0.0.1", "--port", "8000", *FLAGS]

    words, env, _ = serve(
        "docker", folder=tmp_path, SEED="1", BIND="10.0.0.11", PORT="81", VLLM_API_KEY="the-key"
    )
    assert words == [
        *expected,
        *image,
        "--host",
        "10.0.0.11",
        "--port",
        "81",
        *FLAGS,
    ]
    # docker takes it from its environment
    assert env["VLLM_API_KEY"] == "the-key" and "the-key" not in words

    words, _, _ = serve(
        "docker", folder=tmp_path, SEED="1", LORA_RANK="9", MAX_STALENESS="1", CONTEXT="512"
    )
    assert [
        words[words.index(n) + 1] for n in ("--max-lora-rank", "--max-loras", "--max-model-len")
    ] == [
        "16",
        "3",
        "512",
    ]

    (tmp_path / "words").unlink()
    words, _, done = serve("docker", folder=tmp_path, MOUNT="/nowhere", SEED="1")
    assert (
        done.returncode == 2
        and "/nowhere is not a directory: mount the bucket there first" in done.stderr
    )
    assert words == []


def test_serve_here(tmp_path):
    words, env, _ = serve("here", folder=tmp_path, SEED="1", VLLM_API_KEY="the-key")
    assert words == [
        "vllm",
        "serve",
        "Qwen/Qwen2.5-Math-1.5B",
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
        *FLAGS,
    ]
    assert env == env | SETTINGS | {"VLLM_API_KEY": "the-key"}
    (tmp_path / "words").unlink()
    assert serve("nowhere", folder=tmp_path, SEED="1")[2].returncode == 2
    words, _, done = serve(folder=tmp_path, SEED="1")
    assert done.returncode != 0 and "BUCKET: is not set: user/name" in done.stderr and words == []
    words, _, done = serve("here", folder=tmp_path)
    assert done.returncode != 0 and "SEED: is not set: a number that no" in done.stderr
    alone = bash(ROOT / "serve.sh", "here", env={"PATH": "/usr/bin:/bin"})
    said = "MODEL: is not set: ./launch.sh serve here sets all but SEED and BUCKET"
    assert alone.returncode != 0 and said in alone.stderr


# ---- --local


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone in which everything is installed and the small model made, with fakes for vLLM and
    torchrun."""
    tree = copy_of_scripts(tmp_path_factory.mktemp("checkout") / "tree")
    (tree / "check.sh").unlink()
    (tree / "bench/report.py").write_text(
        "import os, sys\nassert os.path.isdir(sys.argv[1])\n"
        "sys.stdout.write(f'the report of {sys.argv[1]}\\n')\n"
    )
    shutil.copytree(ROOT / "local", tree / "local", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", tree)
    for name in ("torchrun", "train.py", "vllm"):
        (tree / "local" / name).unlink(missing_ok=True)
        (tree / "local" / name).symlink_to(FAKES / name)
    (tree / ".local/venv").mkdir(parents=True)
    for part in ("bin", "lib", "pyvenv.cfg"):
        (tree / ".local/venv" / part).symlink_to(BIN.parent / part)
    pins = (tree / "local/requirements.txt").read_text() + (tree / "requirements.txt").read_text()
    (tree / ".local/venv/ready").write_text(pins)
    (tree / ".local/tiny").mkdir()
    shutil.copy(tree / "local/tiny_model.py", tree / ".local/tiny/made_by")
    git = lambda *words: (
        subprocess.run(
            ["git", "-C", tree, *words], check=True, capture_output=True, text=True
        ).stdout
    )
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--message", "x")
    yield tree
    assert git("status", "--porcelain") == ""


class Local(Launch):
    def __init__(self, tree: Path, run: str, *arguments: str, **env: str):
        env = {
            "PATH": SYSTEM,
            "HOME": str(tree.parent),
            "RUN": run,
            "PROXY_PORT": str(free_port()),
            "POLL_S": "1",
            "TRAIN_SCRIPT": "local/train.py",
        } | env
        super().__init__(
            [tree / "launch.sh", "--local", *arguments], env, tree.parent / f"{run}.log"
        )
        self.here, self.run = tree / ".local", run

    def processes(self) -> list[str]:
        """Command lines of what this run has started and has not ended: its paths are in their
        environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if (
                    f"{self.here}/{self.run}".encode()
                    in (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
                ):
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextlib.contextmanager
def local(*arguments, **env):
    launch = Local(*arguments, **env)
    try:
        yield launch
    finally:
        launch.kill()  # the stand-in ends with its parent, the Jobs with the stand-in
        until(lambda: not launch.processes(), "the end of the run's processes", launch.processes)


def test_local_run(checkout):
    output = checkout / ".local/buckets/local/lora/whole"
    output.mkdir(parents=True)
    (output / "order").write_text("0")
    with local(checkout, "whole", MAX_STEPS="7", REPLICAS="1", LORA_RANK="2") as run:
        said = run.ends(0)
        assert run.processes() == []
    bill = "whole: 7 steps, 1 x h200 + h200x2 (local and free; on Hugging Face $15 per hour)"
    assert bill in said and "--nproc-per-node 2 local/train.py" in said
    seen = json.loads(said.split("trainer's environment: ")[1].splitlines()[0])
    assert seen["MODEL"] == f"{checkout}/.local/tiny/model" and seen["EVAL_DATASET"].endswith(
        "tiny/held-out-sums"
    )
    assert (seen["MAX_STEPS"], seen["LORA_RANK"]) == ("7", "2")
    assert not seen["TRACKIO_SPACE_ID"] and "hf_local" not in said
    assert f"the report of {checkout}/.local/whole/lora/whole" in said.splitlines()[-1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_local_run_is_interrupted(checkout, signum):
    """Ctrl-C and a closed terminal reach the whole process group, the others the launcher alone."""
    with local(checkout, f"stopped-{signum}", REPLICAS="1") as run:
        run.says("training on")
        to_all = signum in (signal.SIGINT, signal.SIGHUP)
        (os.killpg if to_all else os.kill)(run.process.pid, signum)
        if signum == signal.SIGKILL:
            run.process.wait(10)
            until(lambda: not run.processes(), "the end of the stand-in and its Jobs")
        else:
            said = run.ends(128 + signum)
            assert ("cancelling" in said) == (signum != signal.SIGHUP)
            assert run.processes() == []


def test_a_replica_dies_at_its_start(checkout):
    """Its last words are in what the launcher says, and where the rest is; the other Jobs end."""
    with local(checkout, "dies", REPLICAS="1", MODEL="broken", ATTEMPTS="1") as run:
        said = run.ends(1)
        assert run.processes() == []
    assert "[replica 1] ValueError: broken is no model that I know" in said
    [job] = re.findall(
        r"replica 1 has ended; above is the end of its log: hf jobs logs (\w+)", said
    )
    [logs] = re.findall(r"their logs are (\S+)", said)
    assert "ValueError: broken" in Path(logs.replace("*", job)).read_text()
    assert "[launch] 0 replicas are left, 1 needed" in said
    assert "[launch] the trainer's Job did not complete" in said


def test_local_run_cannot_start(checkout, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with local(checkout, "port", PROXY_PORT=str(port), ATTEMPTS="1") as run:
            said = f"[launch] PROXY_PORT={port} is in use"
            assert said in run.ends(1)
    (tmp_path / "df").write_text("#!/bin/sh\necho Filesystem; echo /dev/x 1 1 200000 99% /\n")
    (tmp_path / "df").chmod(0o755)
    with local(checkout, "disk", PATH=f"{tmp_path}:{SYSTEM}") as run:
        assert f"the disk of {checkout} has 0 GB left: 1 is needed" in run.ends(1)
    with local(checkout, "detached", "--detach") as run:
        assert "--detach: a local run ends with its launcher" in run.ends(1)
    with local(checkout, "printed", "--dry-run") as run:
        assert "local and free" in run.ends(0) and run.said.count("hf jobs run") == 3
    source = (checkout / "local/jobs_api.py").read_text()
    (checkout / "local/jobs_api.py").write_text("raise SystemExit('a reason')")
    try:
        with local(checkout, "api") as run:
            assert "a reason" in run.ends(1)
    finally:
        (checkout / "local/jobs_api.py").write_text(source)
