"""launch.sh and serve.sh, with the real `hf` CLI, the Jobs API stand-in, proxy.py, and fakes of vLLM and the trainer.

python -m pytest tests/test_launch.py        # three minutes
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
import time
import urllib.request
from pathlib import Path

import pytest
from test_jobs_api import BIN, TOKEN, StandIn, free_port

ROOT = Path(__file__).resolve().parents[1]
FAKES = ROOT / "tests/fake_job"
SCRIPTS = ("launch.sh", "serve.sh", "proxy.py", "train.py", "requirements.txt")
SYSTEM = "/usr/local/bin:/usr/bin:/bin"
DEADLINE_S = 90  # for anything a test waits for: `hf` alone takes a second a call on a busy machine
ENDED = ("COMPLETED", "CANCELED", "ERROR")


def until(condition, what: str, seen=lambda: ""):
    """Poll `condition` until it is truthy and return its value; fail after DEADLINE_S, showing what is `seen`."""
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
                arguments, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
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
    """A copy of the scripts, a Jobs API stand-in whose Jobs find the fakes on their PATH, and launches from there."""

    def __init__(self, folder: Path, *options: str):
        self.folder, self.tree, self.launches = folder, copy_of_scripts(folder / "tree"), []
        self.api = StandIn(folder / "state", "--grace", "8", *options, path=str(FAKES))
        buckets = folder / "state/buckets/local"
        buckets.mkdir(parents=True)
        (buckets / "code").symlink_to(self.tree)
        self.bucket = buckets / "lora"
        self.env = {"PATH": f"{BIN}:{SYSTEM}", "HOME": str(folder), "HF_ENDPOINT": self.api.url, "HF_TOKEN": TOKEN}
        self.env |= {"BUCKET": "local/lora", "MOUNT": str(folder / "lora"), "CODE_DIR": str(folder / "code")}
        self.env |= {"CODE_VOLUME": f"hf://buckets/local/code:{folder}/code:ro", "REPLICAS": "1"}
        self.env |= {"POLL_S": "3", "START_MINUTES": "2", "ATTEMPTS": "1"}

    def launch(self, *arguments: str, run: str, **env: str) -> Launch:
        env = self.env | {"RUN": run, "PROXY_PORT": str(free_port()), "PORT": str(free_port())} | env
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
        """(role, stage) of the run's Jobs, all of which have to have ended by now, or to be about to."""
        until(
            lambda: all(stage in ENDED for _, stage in self.stages(run)), f"the end of {run}", lambda: self.stages(run)
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
    """The commands that --dry-run prints, in words, and what else it says. It has no network and no `hf`."""
    done = bash(tree / "launch.sh", "--dry-run", env={"PATH": "/usr/bin:/bin", "RUN": "dry"} | env)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    lines = done.stdout.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("[launch]")]
    return commands, "\n".join(line for line in lines if line.startswith("[launch]"))


def volume(spec: str) -> dict:
    source, target, *mode = spec.removeprefix("hf://buckets/").split(":")
    return {"type": "bucket", "source": source, "mountPath": target} | ({"readOnly": True} if mode == ["ro"] else {})


def job_of(words: list[str]) -> dict:
    """What `hf jobs run ...` asks the Jobs API for."""
    split = words.index("--")
    parser = argparse.ArgumentParser()
    for flag in ("--detach", "--quiet"):
        parser.add_argument(flag, action="store_true", required=True)
    for flag in ("--flavor", "--timeout", "--attempts", "--network-group", "--network-alias", "--expose", "--secrets"):
        parser.add_argument(flag)
    for flag in ("--label", "--volume", "--env"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("image")
    assert words[:3] == ["hf", "jobs", "run"]
    args = parser.parse_args(words[3:split])
    pairs = lambda values: dict(value.split("=", 1) for value in values)
    return {
        "flavor": args.flavor, "timeoutSeconds": int(args.timeout.removesuffix("h")) * 3600,
        "retry": int(args.attempts or 1) - 1, "labels": pairs(args.label), "environment": pairs(args.env),
        "secrets": {args.secrets: "***"} if args.secrets else {}, "volumes": [volume(spec) for spec in args.volume],
        "expose": [int(args.expose)] if args.expose else [], "dockerImage": args.image, "command": words[split + 1 :],
        "network": {"group": args.network_group, "aliases": [args.network_alias]} if args.network_group else None,
    }  # fmt: skip


def planned(commands: list[list[str]]) -> tuple[list[dict], dict]:
    """(replicas, trainer) among the commands."""
    jobs = [job_of(words) for words in commands if words[:3] == ["hf", "jobs", "run"]]
    roles = [job["labels"]["role"] for job in jobs]
    assert roles == ["replica"] * (len(jobs) - 1) + ["trainer"]
    return jobs[:-1], jobs[-1]


def flag(job: dict, name: str) -> str:
    return job["command"][job["command"].index(name) + 1]


def test_the_default_run():
    commands, said = dry_run(BUCKET="me/lora")
    assert said == "[launch] dry: 500 steps, 3 replicas on h200 + trainer on h200x2: $25 an hour"
    assert commands[0] == ["hf", "buckets", "create", "me/lora", "--private", "--exist-ok", "--quiet"]
    staged = ["train.py", "proxy.py", "serve.sh", "launch.sh", "requirements.txt"]
    assert commands[1:3] == [["mkdir", "-p", ".local/code-dry"], ["cp", *staged, ".local/code-dry"]]
    replicas, trainer = planned(commands)
    serve = (
        "vllm serve Qwen/Qwen2.5-Math-1.5B --host 0.0.0.0 --port 8000 --dtype bfloat16 --max-model-len 4096 "
        "--logprobs-mode processed_logprobs --generation-config vllm --enable-lora --max-lora-rank 1 --max-loras 6"
    )
    for slot, replica in enumerate(replicas, 1):
        assert replica["command"] == [*serve.split(), "--seed", str(slot)]
        assert replica["environment"] == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        assert replica["labels"] == {"run": "dry", "role": "replica", "slot": str(slot)}
        assert replica["volumes"] == [volume("me/lora:/lora:ro")] and replica["expose"] == [8000]
        assert replica["flavor"] == "h200" and replica["secrets"] == {} and replica["retry"] == 0
    assert trainer["command"] == ["bash", "/code/launch.sh", "trainer"] and trainer["secrets"] == {"HF_TOKEN": "***"}
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
        assert trainer["flavor"] == "h200" and "$10 an hour" in dry_run(BUCKET="me/lora", **change)[1]


def test_network_group_in_a_dry_run():
    jobs, trainer = planned(dry_run(BUCKET="me/lora", NETWORK_GROUP="1")[0])
    assert [job["network"] for job in jobs] == [{"group": "dry", "aliases": [f"replica-{n}"]} for n in (1, 2, 3)]
    assert trainer["network"] == {"group": "dry", "aliases": ["trainer"]}
    assert all(job["expose"] == [] for job in (*jobs, trainer)) and trainer["environment"]["NETWORK_GROUP"] == "1"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"CONTEXT": "3000"}, "MAX_COMPLETION=3000 in train.py leaves no room for a prompt: CONTEXT=3000"),
        ({"CONTEXT": "20000"}, "TOKEN_BUDGET=16384 in train.py is below CONTEXT=20000"),
        ({"LORA_RANK": "513"}, "LORA_RANK=513: vLLM takes at most 512"),
        ({"LORA_RANK": "0"}, "LORA_RANK=0: a whole number above 0"),
        ({"MAX_STALENESS": "-1"}, "MAX_STALENESS=-1: a whole number"),
        ({"REPLICAS": "none"}, "REPLICAS=none: a whole number above 0"),
        ({"RUN": "my run"}, "RUN=my run: a Job's label takes"),
        ({"RUN": "Run_1", "NETWORK_GROUP": "1"}, "RUN=Run_1 names the network group, too"),
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
    (tree / "proxy.py").unlink()
    done = bash(tree / "launch.sh", "--dry-run", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1 and "proxy.py is not beside launch.sh" in done.stderr


def test_usage():
    done = bash(ROOT / "launch.sh", "--halp", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "./launch.sh --local" in done.stderr and done.stdout == ""
    done = bash(ROOT / "launch.sh", "--stop", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1 and "which run? RUN=... ./launch.sh --stop" in done.stderr


# ---- A run


def test_a_run_is_what_the_dry_run_printed(ground, tmp_path):
    """Submitted as printed, followed to its end, nothing left; the token is in no argument list and no output."""
    env = {"REPLICAS": "2", "MAX_STEPS": "9", "MAX_STALENESS": "3", "LORA_RANK": "4", "EVAL_DATASET": ""}
    env |= {"ATTEMPTS": "2", "PORT": "8000", "PROXY_PORT": str(free_port())}
    for program in ("hf", "curl"):  # which write down how they are called
        path = shutil.which(program, path=ground.env["PATH"])
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@" >>{tmp_path}/called\nexec {path} "$@"\n')
        (tmp_path / program).chmod(0o755)
    launch = ground.launch(run="happy", PATH=f"{tmp_path}:{ground.env['PATH']}", **env)
    launch.says("training on")
    everywhere = [words_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
    assert not any(TOKEN.encode() in word for words in everywhere for word in words)
    ground.order("happy", 0)
    said = launch.ends(0)
    called = (tmp_path / "called").read_text()
    assert "/api/whoami-v2" in called and "hf jobs run" in called and TOKEN not in called

    commands, _ = dry_run(ground.tree, **(ground.env | env | {"RUN": "happy", "PATH": "/usr/bin:/bin"}))
    replicas, trainer = planned(commands)
    assert commands[0][:3] == ["hf", "buckets", "create"] and ground.bucket.is_dir()
    for wanted, job in zip((*replicas, trainer), ground.jobs("happy"), strict=True):
        job["labels"].pop("name")  # `hf` makes one up
        job["expose"] = job.get("expose", {}).get("ports", [])
        assert {name: job.get(name) for name in wanted} == wanted

    bill, progress = (
        "9 steps, 2 replicas on h200 + trainer on h200x2: $20 an hour",
        "trainer RUNNING, replicas RUNNING RUNNING",
    )
    for text in (bill, "] replica 2: Job", "] trainer: Job", progress, "attempt 1 of 2", "[proxy] replica 1 ("):
        assert text in said
    assert "torchrun --nproc-per-node gpu train.py" in said
    seen = json.loads(said.split("trainer's environment: ")[1].splitlines()[0])
    wanted = {"MAX_STEPS": "9", "MAX_STALENESS": "3", "LORA_RANK": "4", "EVAL_DATASET": "", "RUN": "happy"}
    assert seen == seen | wanted and seen["MOUNT"] == ground.env["MOUNT"]
    assert "[launch] completed: scoreboard, checkpoints and adapter are in hf://buckets/local/lora/happy" in said
    assert ground.stages("happy") == [("replica", "CANCELED")] * 2 + [("trainer", "COMPLETED")]
    for job in ground.jobs("happy"):
        assert TOKEN not in "\n".join(ground.api.log(job["id"]))


def test_a_run_outlives_its_terminal_its_trainer_and_its_replicas(ground):
    launch = ground.launch(run="life", REPLICAS="2", ATTEMPTS="3")
    launch.says("training on")
    os.kill(launch.process.pid, signal.SIGHUP)  # the terminal is closed
    assert "cancelled" not in launch.ends(129)
    *before, trainer = ground.jobs("life")
    assert [job["status"]["stage"] for job in (*before, trainer)] == ["RUNNING"] * 3

    for pid in processes(f"JOB_ID={trainer['id']}"):  # the trainer is preempted: SIGKILL to all
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said = lambda text, times: until(lambda: sum(text in line for line in ground.api.log(trainer["id"])) >= times, text)
    said("attempt 2 of 3", 1)
    said("training on", 2)
    ground.order("life", 3)  # the trainer crashes
    said("train.py failed (exit 3): its error is above, checkpoints in", 1)
    said("attempt 3 of 3", 1)
    said("training on", 3)
    assert [job["id"] for job in ground.jobs("life")] == [job["id"] for job in (*before, trainer)]  # the same replicas

    attached = Launch(
        [ground.tree / "launch.sh", "--attach"], {**ground.env, "RUN": "life"}, ground.folder / "attached"
    )
    ground.launches.append(attached)
    attached.says("attempt 3 of 3")
    ground.api.cancel(before[0]["id"])  # a replica ends early
    attached.says(f"replica 1 ended early (hf jobs logs {before[0]['id']}): another one takes its place")
    attached.says("[launch] replica 1: Job")
    [another] = [job for job in ground.jobs("life", "replica") if job["status"]["stage"] in ("RUNNING", "SCHEDULING")][
        1:
    ]
    assert another["labels"]["slot"] == "1" and flag(another, "--seed") == "1"
    urls = {url for job in (before[1], another) for url in job["status"]["exposeUrls"]}

    def in_service():
        with urllib.request.urlopen(f"{launch.proxy}/stats", timeout=10) as answer:
            return {replica["url"] for replica in json.load(answer)["replicas"] if replica["state"] == "ready"}

    until(lambda: in_service() == urls, "the proxy to have the new replica in service, and no longer the old one")
    ground.order("life", 0)
    attached.ends(0)
    assert sorted(ground.all_ended("life")) == [("replica", "CANCELED")] * 3 + [("trainer", "COMPLETED")]


def test_stop_after_the_launcher_was_killed(ground, tmp_path):
    launch = ground.launch(run="killed")
    launch.says("[launch] trainer: Job")
    launch.kill()  # no trap runs
    again = ground.launch(run="killed").ends(1)
    assert "run killed is going already" in again and "Job " not in again
    elsewhere = copy_of_scripts(tmp_path / "elsewhere")
    env = {name: ground.env[name] for name in ("PATH", "HOME", "HF_ENDPOINT", "HF_TOKEN")}
    stopped = bash(elsewhere / "launch.sh", "--stop", env=env | {"RUN": "killed"})
    assert stopped.returncode == 0 and stopped.stdout.count("cancelled Job") >= 1, stopped.stdout + stopped.stderr
    assert ground.stages("killed") == [("replica", "CANCELED"), ("trainer", "CANCELED")]


def test_detached_and_then_cancelled_by_hand(ground):
    """No launcher is there: the trainer Job itself sees to the replicas."""
    said = ground.launch("--detach", run="alone").ends(0)
    assert "left running: RUN=alone ./launch.sh --attach" in said and "trainer RUNNING" in said
    _, trainer = ground.jobs("alone")
    ground.api.cancel(trainer["id"])
    assert ground.all_ended("alone") == [("replica", "CANCELED"), ("trainer", "CANCELED")]
    attached = bash(ground.tree / "launch.sh", "--attach", env=ground.env | {"RUN": "alone"})
    assert attached.returncode == 1 and f"Job {trainer['id']} has ended: CANCELED" in attached.stderr


@pytest.mark.parametrize(("signum", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_interrupted_while_jobs_are_created(ground, signum, to_all, code):
    """Ctrl-C reaches `hf` as well, SIGTERM the launcher alone; either comes while the second replica is created."""
    run = f"signal-{signum}"
    launch = ground.launch(run=run, REPLICAS="2")
    launch.says("[launch] replica 1: Job")
    (os.killpg if to_all else os.kill)(launch.process.pid, signum)
    assert "trainer: Job" not in launch.ends(code)
    stages = ground.stages(run)
    assert stages and set(stages) == {("replica", "CANCELED")}


def test_a_job_is_refused_midway(tmp_path):
    with a_ground(tmp_path, "--max-jobs", "1") as ground:
        said = ground.launch(run="poor").ends(1)
        assert "402 Payment Required" in said and "[launch] cancelled Job" in said and "trainer: Job" not in said
        assert ground.stages("poor") == [("replica", "CANCELED")]


def test_replacements_are_bounded(ground):
    """As the trainer on a machine that is no Job, with replicas that are; twice as many as REPLICAS are replaced."""
    mount = ground.folder / "mounted"
    mount.symlink_to(ground.bucket)
    path = f"{FAKES}:{ground.env['PATH']}"
    trainer = ground.launch("trainer", run="bounded", MOUNT=str(mount), PATH=path, POLL_S="1")
    for number in range(1, 4):
        trainer.says("[launch] replica 1: Job", times=number)
        trainer.says("training on")
        ground.api.cancel(ground.jobs("bounded")[-1]["id"])
    said = trainer.ends(1)
    assert said.count("another one takes its place") == 2 and "2 have been replaced, it is not" in said
    assert "[launch] no replica is left" in said
    assert ground.stages("bounded") == [("replica", "CANCELED")] * 3


def test_network_group(ground):
    """The aliases resolve to nothing here: what counts is that they are what the proxy is given."""
    launch = ground.launch(run="group", NETWORK_GROUP="1")
    port = flag(until(lambda: ground.jobs("group"), "the first Job")[0], "--port")
    launch.says(f"[proxy] {launch.proxy} in front of 1 replicas: http://group-replica-1:{port}")
    replica, trainer = ground.jobs("group")
    assert replica["network"] == {"group": "group", "aliases": ["replica-1"]} and "expose" not in replica
    assert trainer["network"] == {"group": "group", "aliases": ["trainer"]} and "expose" not in trainer
    os.killpg(launch.process.pid, signal.SIGINT)
    assert "cancelled Job" in launch.ends(130)
    assert ground.stages("group") == [("replica", "CANCELED"), ("trainer", "CANCELED")]


def test_check(ground):
    said = ground.launch("--check", run="ground").ends(0)
    assert "the exposed port answers 200 with the token and 401 without" in said
    for number in range(1, 6):
        assert f"[check] directory {number} was whole on the other mount after 0." in said
    assert "$15 an hour" in said
    jobs = ground.jobs("check-ground")
    assert [(job["labels"]["role"], job["flavor"]) for job in jobs] == [("probe", "cpu-basic")] * 2
    assert [job["expose"]["ports"] if "expose" in job else [] for job in jobs] == [
        [int(jobs[0]["environment"]["PORT"])],
        [],
    ]
    assert [job["volumes"][1].get("readOnly", False) for job in jobs] == [True, False]
    assert all(stage in ENDED for _, stage in ground.stages("check-ground"))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PATH": "/nowhere:/usr/bin:/bin"}, "the hf command is not there: pip install -U huggingface_hub"),
        ({"PATH": "OLD"}, "hf 1.30.1 is too old, 2.4 or newer is needed"),
        ({"HF_TOKEN": ""}, "not logged in: hf auth login, or set HF_TOKEN"),
        ({"HF_TOKEN": "readonly-0123"}, "this token can only read"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "Hugging Face does not know this token, or cannot be reached"),
        ({"BUCKET": ""}, "set BUCKET=user/name"),
        ({"BUCKET": "lora"}, "set BUCKET=user/name"),
        ({"BUCKET": "someone/else"}, "the bucket someone/else is not there and cannot be made"),
    ],
)
def test_preflight(ground, tmp_path, env, message):
    if env.get("PATH") == "OLD":
        (tmp_path / "hf").write_text("#!/bin/sh\necho 1.30.1\n")
        (tmp_path / "hf").chmod(0o755)
        env = {"PATH": f"{tmp_path}:{SYSTEM}"}
    said = ground.launch(run="early", **env).ends(1)
    assert f"[launch] {message}" in said and "cancelled" not in said
    assert ground.jobs("early") == [] and ("an hour" in said) == (env == {"BUCKET": "someone/else"})


# ---- Without Hugging Face


class Machine:
    """A plain machine: the scripts, the bucket mounted, no `hf`; and two replicas on others, which ask for a key."""

    KEY = "key-of-ours"

    def __init__(self, folder: Path):
        self.folder, self.tree, self.mount, self.launches = (
            folder,
            copy_of_scripts(folder / "tree"),
            folder / "lora",
            [],
        )
        tools = folder / "bin"
        for directory in (self.mount / "own", tools):
            directory.mkdir(parents=True)
        for name, program in {
            "python3": sys.executable,
            "torchrun": FAKES / "torchrun",
            "train.py": FAKES / "train.py",
        }.items():
            (tools / name).symlink_to(program)
        self.port, ports = free_port(), (free_port(), free_port())
        self.env = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder), "MOUNT": str(self.mount), "RUN": "own"}
        self.env |= {"PROXY_PORT": str(self.port), "POLL_S": "1"}
        self.env |= {"REPLICA_URLS": ",".join(f"http://127.0.0.1:{port}" for port in ports)}
        for port in ports:
            serve = ["serve", "Qwen/Qwen2.5-Math-1.5B", "--port", str(port), "--max-loras", "6", "--max-lora-rank", "1"]
            self.start([sys.executable, FAKES / "vllm", *serve], {"PATH": "/usr/bin:/bin", "FAKE_KEY": self.KEY})

    def start(self, words, env) -> Launch:
        self.launches.append(Launch(words, env, self.folder / f"{len(self.launches)}.log"))
        return self.launches[-1]

    def trainer(self, **env: str) -> Launch:
        return self.start([self.tree / "launch.sh", "trainer"], self.env | {"VLLM_API_KEY": self.KEY} | env)

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
    said = machine.trainer(HF_TOKEN=TOKEN).ends(0)  # the replicas refuse what does not bear their key
    assert said.count("in service, holds no adapter") == 2 and "torchrun --nproc-per-node gpu train.py" in said
    assert f"training on {' '.join(sorted(machine.env['REPLICA_URLS'].split(',')))}" in said
    assert machine.KEY not in said and "replica 1" not in said.replace("[proxy] replica 1", "")  # no Job was started
    machine.order(0)
    assert "the replicas are ready" in machine.trainer(VLLM_API_KEY="", HF_TOKEN=machine.KEY).ends(0)  # as on Jobs


def test_replicas_of_ones_own_with_another_key(machine):
    trainer = machine.trainer(VLLM_API_KEY="another")
    trainer.says("/health answers 401", times=2)
    trainer.process.terminate()  # it would wait for half an hour
    assert "torchrun" not in trainer.ends(143)
    with pytest.raises(ConnectionRefusedError):  # the proxy has ended, too
        socket.create_connection(("127.0.0.1", machine.port))


def test_each_part_of_the_trainer_names_itself_when_it_fails(machine):
    machine.order(5)
    assert "[launch] train.py failed (exit 5): its error is above, checkpoints in" in machine.trainer().ends(1)
    trainer = machine.trainer()
    trainer.says("training on")
    os.kill(
        next(pid for pid in processes(f"PROXY_PORT={machine.port}") if b"proxy.py" in words_of(pid)), signal.SIGKILL
    )
    assert "[launch] proxy.py ended while train.py went on (exit 137): its error is above" in trainer.ends(1)
    with socket.create_server(("127.0.0.1", machine.port)):
        assert f"[launch] port {machine.port} is taken on this machine: set PROXY_PORT" in machine.trainer().ends(1)
    said = machine.trainer(REPLICA_URLS="http://127.0.0.1:9:9").ends(1)
    assert "[proxy] REPLICA_URLS: " in said and "[launch] proxy.py ended before the replicas were ready" in said
    (machine.mount / "full").write_text("a file where the run's directory should be made")
    assert "full refused a write: is the bucket mounted read-write, with space" in machine.trainer(RUN="full").ends(1)
    assert "MOUNT=/nowhere is not there: mount the bucket first" in machine.trainer(MOUNT="/nowhere").ends(1)
    assert "leaves no room for a prompt: CONTEXT=2000" in machine.trainer(CONTEXT="2000").ends(1)
    (machine.tree / "requirements.txt").write_text("./nothing.whl\n")
    said = machine.trainer().ends(1)
    assert said.count("ERROR: ") >= 3 and "[launch] pip failed: its error is above" in said


def serve(*arguments: str, folder: Path, **env: str) -> tuple[list[str], dict, subprocess.CompletedProcess]:
    """Run serve.sh with a `docker` and a `vllm` on the PATH that write down their words and their environment."""
    for program in ("docker", "vllm"):
        (folder / program).write_text(
            f'#!/bin/sh\nprintf "%s\\0" {program} "$@" >{folder}/words; env -0 >{folder}/env\n'
        )
        (folder / program).chmod(0o755)
    done = bash(ROOT / "serve.sh", *arguments, env={"PATH": f"{folder}:/usr/bin:/bin", "MOUNT": str(folder)} | env)
    if not (folder / "words").exists():
        return [], {}, done
    words, environment = ((folder / name).read_text().split("\0")[:-1] for name in ("words", "env"))
    return words, dict(line.split("=", 1) for line in environment), done


FLAGS = """--dtype bfloat16 --max-model-len 4096 --logprobs-mode processed_logprobs --generation-config vllm
--enable-lora --max-lora-rank 1 --max-loras 6 --seed 1""".split()
SETTINGS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


def test_serve_in_docker(tmp_path):
    words, _, done = serve("docker", folder=tmp_path, SEED="1")
    assert done.returncode == 0, done.stderr
    expected = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--network", "host"]
    expected += ["--volume", f"{tmp_path}:{tmp_path}:ro,rslave", *(f"--env={k}={v}" for k, v in SETTINGS.items())]
    image = ["--entrypoint", "vllm", "vllm/vllm-openai:v0.27.1", "serve", "Qwen/Qwen2.5-Math-1.5B"]
    assert words == [*expected, *image, "--host", "127.0.0.1", "--port", "8000", *FLAGS]  # nobody else reaches it

    words, env, _ = serve("docker", folder=tmp_path, SEED="1", BIND="10.0.0.11", PORT="81", VLLM_API_KEY="the-key")
    assert words == [*expected, "--env", "VLLM_API_KEY", *image, "--host", "10.0.0.11", "--port", "81", *FLAGS]
    assert env["VLLM_API_KEY"] == "the-key" and "the-key" not in words  # docker takes it from its environment

    words, _, _ = serve("docker", folder=tmp_path, SEED="1", LORA_RANK="9", MAX_STALENESS="1", CONTEXT="512")
    assert [words[words.index(n) + 1] for n in ("--max-lora-rank", "--max-loras", "--max-model-len")] == [
        "16",
        "3",
        "512",
    ]

    (tmp_path / "words").unlink()
    words, _, done = serve("docker", folder=tmp_path, MOUNT="/nowhere")
    assert done.returncode == 2 and "/nowhere is not a directory: mount the bucket there first" in done.stderr
    assert words == []


def test_serve_here(tmp_path):
    words, env, _ = serve("here", folder=tmp_path, SEED="1", VLLM_API_KEY="the-key")
    assert words == ["vllm", "serve", "Qwen/Qwen2.5-Math-1.5B", "--host", "127.0.0.1", "--port", "8000", *FLAGS]
    assert env == env | SETTINGS | {"VLLM_API_KEY": "the-key"}
    (tmp_path / "words").unlink()
    assert serve("nowhere", folder=tmp_path)[2].returncode == 2
    words, _, done = serve(folder=tmp_path)
    assert done.returncode != 0 and "BUCKET=user/name is not set" in done.stderr and words == []


# ---- --local


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone in which everything is installed and the small model made, with fakes for vLLM and torchrun."""
    tree = copy_of_scripts(tmp_path_factory.mktemp("checkout") / "tree")
    (tree / "check.sh").unlink()
    shutil.copytree(ROOT / "local", tree / "local", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", tree)
    for name in ("torchrun", "train.py", "vllm"):
        (tree / "local" / name).unlink(missing_ok=True)
        (tree / "local" / name).symlink_to(FAKES / name)
    (tree / ".local/venv").mkdir(parents=True)
    (tree / ".local/venv/bin").symlink_to(BIN)
    pins = (tree / "local/requirements.txt").read_text() + (tree / "requirements.txt").read_text()
    (tree / ".local/venv/ready").write_text(pins)
    (tree / ".local/tiny").mkdir()
    shutil.copy(tree / "local/tiny_model.py", tree / ".local/tiny/made_by")
    git = lambda *words: subprocess.run(["git", "-C", tree, *words], check=True, capture_output=True, text=True).stdout
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
        } | env
        super().__init__([tree / "launch.sh", "--local", *arguments], env, tree.parent / f"{run}.log")
        self.here, self.run = tree / ".local", run

    def processes(self) -> list[str]:
        """Command lines of what this run has started and has not ended: its paths are in their environment."""
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
    assert (
        "whole: 7 steps on this machine, free (on Jobs, 1 replicas on h200 + trainer on h200x2: $15 an hour)" in said
        and "--nproc-per-node 2 local/cpu_train.py" in said
    )
    seen = json.loads(said.split("trainer's environment: ")[1].splitlines()[0])
    assert seen["MODEL"] == f"{checkout}/.local/tiny/model" and seen["EVAL_DATASET"].endswith("tiny/held-out-sums")
    assert (seen["MAX_STEPS"], seen["LORA_RANK"]) == ("7", "2")
    assert f"everything has ended; the bucket is {output}" in said and "hf_local" not in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_local_run_is_interrupted(checkout, signum):
    """Ctrl-C reaches the whole process group, SIGKILL the launcher alone."""
    with local(checkout, f"stopped-{signum}", REPLICAS="1") as run:
        run.says("training on")
        (os.kill if signum == signal.SIGKILL else os.killpg)(run.process.pid, signum)
        if signum == signal.SIGKILL:
            run.process.wait(10)
            until(lambda: not run.processes(), "the end of the stand-in and its Jobs")
        else:
            said = run.ends(128 + signum)
            assert said.count("cancelled Job") >= 1 and f"the logs are {run.here}/{run.run}/jobs/*/log" in said
            assert run.processes() == []


def test_a_replica_dies_at_its_start(checkout):
    """Its last words are in what the launcher says, and where the rest is; the other Jobs end."""
    with local(checkout, "dies", REPLICAS="1", MODEL="broken", ATTEMPTS="1") as run:
        said = run.ends(1)
        assert run.processes() == []
    assert "[replica 1] ValueError: broken is no model that I know" in said
    [job] = re.findall(r"replica 1 ended before the run began; above is the end of its log: hf jobs logs (\w+)", said)
    [logs] = re.findall(r"the logs are (\S+)", said)
    assert "ValueError: broken" in Path(logs.replace("*", job)).read_text()
    assert re.search(r"\[launch\] Job \w+ has ended: ERROR\. Its log: hf jobs logs", said)


def test_local_run_cannot_start(checkout, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with local(checkout, "port", PROXY_PORT=str(port)) as run:
            assert f"[launch] port {port} is taken on this machine: set PROXY_PORT to a free one" in run.ends(1)
    (tmp_path / "df").write_text("#!/bin/sh\necho Filesystem; echo /dev/x 1 1 200000 99% /\n")
    (tmp_path / "df").chmod(0o755)
    with local(checkout, "disk", PATH=f"{tmp_path}:{SYSTEM}") as run:
        assert f"the disk of {checkout} has 0 GB left: 1 is needed" in run.ends(1)
    with local(checkout, "detached", "--detach") as run:
        assert "--local cannot be detached" in run.ends(1)
    source = (checkout / "local/jobs_api.py").read_text()
    (checkout / "local/jobs_api.py").write_text("raise SystemExit('a reason')")
    try:
        with local(checkout, "api") as run:
            assert "local/jobs_api.py did not start: a reason" in run.ends(1)
    finally:
        (checkout / "local/jobs_api.py").write_text(source)
