"""Does a run survive what spot machines and object stores do to it? The local recipe, harmed at
random moments.

    python bench/chaos.py --minutes 10 [--seed N]   # and a few to finish, on two cores, as root

While `./launch.sh --local` trains for real (two vLLM replicas, two FSDP2 ranks), a harm comes every
few seconds:

    kill replica     SIGKILL to all processes of a replica's Job; another attempt takes its place
    kill trainer     SIGKILL to all processes of the trainer Job, at any moment once it has saved a
                     checkpoint since its last death; the next attempt resumes
    freeze replica   SIGSTOP for 2 to 40 s, as a machine that hangs
    cut connections  every connection through the Jobs' exposed ports, at once
    lag              from then on the replicas see the bucket up to 8 s late, each directory first
                     without its weights, then with half of them

You should see a line for each harm, then what was survived and what was checked. Exit code 0: every
check holds."""

import argparse
import collections
import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "local"))

from jobs_api import job_processes

ROOT = Path(__file__).resolve().parent.parent
HARMS = ("kill replica", "kill trainer", "freeze replica", "cut connections", "lag")
# what a plan's `amount` of 0 and of 1 stand for
FREEZE_S = (2, 40)
LAG_S = (0.5, 8)
MOMENT_S = (0, 8)
CHECKPOINT_S = 300  # s without a new checkpoint after which a run is not recovering
FINISH_S = 900  # s for the start of a run, and again for its end once the last harm is done
COUNTS = ("routed", "retried", "ejected", "readmitted", "held")  # of the proxy's /stats


def say(text="", to=sys.stdout):
    """A line in one write: processes that share an output must not write into each other's
    lines."""
    to.write(f"{text}\n")
    to.flush()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(
    command: list[str], log: Path, env: dict[str, str], tree: Path = ROOT
) -> subprocess.Popen:
    """A child process in a session of its own, its output in `log`."""
    with open(log, "w") as output:
        return subprocess.Popen(
            command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen, grace: float):
    """SIGTERM, and SIGKILL to the whole session if that was not enough. Nothing happens to a
    process that has ended."""
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def replica_here(log: Path, *command: str, **env: str):
    """A replica with nothing in front of it, or what `command` starts, ready; yields its URL."""
    here, port = ROOT / ".local", free_port()
    path = f"{ROOT / 'local'}:{here / 'venv/bin'}:{os.environ['PATH']}"
    setting = {"PATH": path, "MODEL": str(here / "tiny/model"), "JOB_PORT": str(port), "SEED": "0"}
    env = os.environ | setting | env
    server = start(list(command) or ["./launch.sh", "serve", "here"], log, env)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    try:
        while not answers(f"{url}/health"):
            try:
                raise RuntimeError(f"vLLM ended (exit {server.wait(0.5)}): see {log}")
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"vLLM is not ready after 300 s: see {log}") from None
        yield url
    finally:
        end(server, grace=30)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


class LocalRun:
    """`./launch.sh --local` as a child process, and its Jobs, logs and bucket as seen from outside.

    A context manager: whatever happens inside, the run and its Jobs have ended afterwards. `tree`
    holds the scripts, `lag` (seconds; None: no mirror) is how late the replicas see the bucket,
    `env` goes to launch.sh."""

    def __init__(
        self, name: str, steps: int, lag: float | None = None, tree: Path = ROOT, **env: str
    ):
        here = tree / ".local"
        self.name, self.steps, self.tree, self.lag, self.mirror = name, steps, tree, lag, None
        self.state = here / name
        self.readers = here / f"{name}-readers"
        self.launch_log = here / f"{name}.launch.log"
        self.output = here / "buckets/local/lora" / name
        self.proxy = f"http://127.0.0.1:{free_port()}"
        port = self.proxy.rpartition(":")[2]
        self.env = os.environ | {"RUN": name, "MAX_STEPS": str(steps), "PROXY_PORT": port} | env

    def __enter__(self):
        self.output.mkdir(parents=True)  # a name used before would resume that run
        if self.lag is not None:
            self.env["LOCAL_READER_BUCKETS"] = str(self.readers)
            (self.readers / "local/lora").mkdir(parents=True)
            code = f"local/{self.name}-code"  # the trainer Job's scripts do not lag
            (self.readers / code).symlink_to(self.tree / ".local/buckets" / code)
        self.process = start(["./launch.sh", "--local"], self.launch_log, self.env, self.tree)
        if self.lag is not None:
            self.set_lag(self.lag)
        return self

    def __exit__(self, *_):
        end(self.process, grace=120)  # by force, the Jobs API too: its watchdog then ends the Jobs
        self.stop_mirror()
        shutil.rmtree(self.readers, ignore_errors=True)

    def set_lag(self, seconds: float, torn: bool = False):
        self.stop_mirror()
        self.lag = seconds
        mirror = [sys.executable, str(ROOT / "local/mirror.py"), str(self.output)]
        mirror += [
            str(self.readers / "local/lora" / self.name),
            "--lag",
            f"{seconds:.2f}",
            *["--torn"] * torn,
        ]
        self.mirror = start(mirror, self.launch_log.with_suffix(".mirror"), os.environ.copy())

    def stop_mirror(self):
        if self.mirror:
            end(self.mirror, grace=10)

    def jobs(self, role: str, stage: str | None = None) -> list[dict]:
        """The records of the run's Jobs in a role, oldest first; in any stage if none is given."""
        found = []
        for path in self.state.glob("jobs/*/job.json"):
            with contextlib.suppress(json.JSONDecodeError):  # just being written
                job = json.loads(path.read_text())
                if job["labels"]["role"] == role and stage in (None, job["status"]["stage"]):
                    found.append(job)
        return sorted(found, key=lambda job: job["createdAt"])

    def log(self) -> str:
        """The trainer Job's log, all attempts."""
        return "".join(
            (self.state / "jobs" / job["id"] / "log").read_text() for job in self.jobs("trainer")
        )

    def last_step(self) -> int:
        return max(
            (int(step) for step in re.findall(r"\[train\] step +(\d+)/", self.log())), default=0
        )

    def checkpoints(self) -> int:
        """How many have been completed so far, by all attempts."""
        return len(re.findall(r"\[train\] checkpoint-\d+ complete", self.log()))

    def history(self) -> list[dict]:
        """What TRL logged, one dict per step, as the newest checkpoint has it; the last one comes
        after the last step."""
        states = self.output.glob("checkpoint-*/trainer_state.json")
        newest = max(
            states, key=lambda path: int(path.parent.name.rpartition("-")[2]), default=None
        )
        return (
            [log for log in json.loads(newest.read_text())["log_history"] if "ratio" in log]
            if newest
            else []
        )

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reaches(self, condition, what: str, seconds: float) -> bool:
        """Wait until `condition()` holds; False if the run ends before. TimeoutError after
        `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ends_within(0.3):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name}: waited {seconds} s for {what}: see {self.launch_log}"
                )
        return True

    def signal_job(self, job: dict, signum: int):
        for pid in job_processes(job["id"], session=-1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill_job(self, job: dict):
        """SIGKILL to all of its processes, as when its machine is preempted. They are stopped
        first, because a machine's processes end at once: none of them reports another's end."""
        self.signal_job(job, signal.SIGSTOP)
        self.signal_job(job, signal.SIGKILL)

    def jobs_api(self) -> int:
        """Process id of the stand-in for the Jobs API, which launch.sh --local becomes."""
        command = Path(f"/proc/{self.process.pid}/cmdline").read_bytes().split(b"\0")
        if str(self.state).encode() not in command:
            raise RuntimeError(f"{self.name}: launch.sh has not become a stand-in: {command}")
        return self.process.pid

    def left_running(self) -> list[int]:
        """Processes of this run that are still there: of its Jobs, and those with its paths in
        their command line."""
        found = {
            pid
            for path in self.state.glob("jobs/*")
            for pid in job_processes(path.name, session=-1)
        }
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if str(self.state).encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return sorted(found)


class Watch:
    """A thread that looks on while a run goes: hashes and keeps a copy of each policy that was ever
    published, and adds up what the proxies did (each attempt of the trainer Job starts one)."""

    def __init__(self, run: LocalRun):
        self.run, self.copies = run, run.state.with_name(f"{run.name}-policies")
        # {name: digests}; files looked at
        self.hashes = collections.defaultdict(set)
        self.seen = set()
        # earlier proxies', the present one's
        self.past = collections.Counter()
        self.proxy = collections.Counter()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look_on, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(20)

    def look_on(self):
        while not self.over.wait(0.2):
            for weights in self.run.output.glob(
                ".vllm_lora/trl-policy-v*/adapter_model.safetensors"
            ):
                with contextlib.suppress(OSError):  # TRL deleted it meanwhile
                    self.look_at(weights)
            with contextlib.suppress(requests.RequestException):  # no proxy between two attempts
                stats = requests.get(f"{self.run.proxy}/stats", timeout=5).json()
                if stats["routed"] < self.proxy["routed"]:
                    self.past += self.proxy
                self.proxy = collections.Counter({name: stats[name] for name in COUNTS})

    def look_at(self, weights: Path):
        stat = weights.stat()
        file = weights, stat.st_ino, stat.st_mtime_ns
        if file not in self.seen:
            self.hashes[weights.parent.name].add(hashlib.sha256(weights.read_bytes()).hexdigest())
            shutil.copytree(weights.parent, self.copies / weights.parent.name, dirs_exist_ok=True)
            self.seen.add(file)


def plan(seed: int, every: float):
    """An endless list of (seconds to wait, harm, amount from 0 to 1), the same for the same seed.
    Harms come in rounds of each once, so that a short run has them all."""
    chance = random.Random(seed)
    while True:
        for harm in chance.sample(HARMS, len(HARMS)):
            yield chance.uniform(0.3, 1.7) * every, harm, chance.random()


def storm(run: LocalRun, harms, seconds: float = math.inf) -> collections.Counter:
    """Harm `run` as planned until `harms` or `seconds` are used up, or it ends. Returns how often
    each was done."""
    done, until, saved = collections.Counter(), time.monotonic() + seconds, 0
    for gap, harm, amount in harms:
        if (
            run.ends_within(max(0.0, min(gap, until - time.monotonic())))
            or time.monotonic() > until
        ):
            break
        if harm == "kill trainer":  # faster than it saves, it could never finish
            enough = saved + 1
            if not run.reaches(
                lambda enough=enough: run.checkpoints() >= enough,
                "the next checkpoint",
                CHECKPOINT_S,
            ):
                break
            if run.ends_within(between(MOMENT_S, amount)):
                break
            saved = run.checkpoints()
        if what := do_harm(run, harm, amount):
            done[harm] += 1
            say(f"[chaos] {harm}: {what}")
    return done


def between(bounds: tuple[float, float], amount: float) -> float:
    return bounds[0] + amount * (bounds[1] - bounds[0])


def do_harm(run: LocalRun, harm: str, amount: float) -> str:
    """Do it and say what was done; "" if there was nothing to harm."""
    if harm == "cut connections":
        os.kill(run.jobs_api(), signal.SIGUSR1)
        return "all"
    if harm == "lag":
        run.set_lag(between(LAG_S, amount), torn=True)
        return f"{run.lag:.1f} s, torn"
    jobs = run.jobs("trainer" if harm == "kill trainer" else "replica", "RUNNING")
    if not jobs:
        return ""
    job = jobs[int(amount * len(jobs))]
    if harm == "freeze replica":
        thaw = threading.Timer(between(FREEZE_S, amount), run.signal_job, (job, signal.SIGCONT))
        thaw.daemon = True
        thaw.start()
        run.signal_job(job, signal.SIGSTOP)
        return f"{job['id']} for {thaw.interval:.0f} s"
    run.kill_job(job)
    return f"{job['id']} after step {run.last_step()}"


def checks(run: LocalRun, watch: Watch, rise: float = 0.2) -> list[tuple[str, bool, str]]:
    """(what was promised, whether it holds, what was found), of a run that has ended."""
    path, log, history = run.output / "scoreboard.json", run.log(), run.history()
    board = (
        json.loads(path.read_text())
        if path.exists()
        else {"steps": 0, "reward_first": 0, "reward_last": 0}
    )
    # of steps redone, too
    ratios = [float(ratio) for ratio in re.findall(r"\[train\] step .* ratio ([\d.]+) ", log)]
    ratios += [step["ratio"] for step in history]
    retries = sum(step.get("rollout/vllm_retry_total") or 0 for step in history)
    retries += len(re.findall(r"; retry \d+/\d+ in \d+s", log))
    gain, left = board["reward_last"] - board["reward_first"], run.left_running()
    mixed = [name for name, files in watch.hashes.items() if len(files) > 1]
    return [
        ("the last step reached", board["steps"] == run.steps, f"{board['steps']} of {run.steps}"),
        ("launch.sh succeeded", run.process.returncode == 0, f"exit code {run.process.returncode}"),
        (f"reward rose by {rise}", gain >= rise, f"{board['reward_first']:.3f} + {gain:.3f}"),
        ("ratio within 0.98-1.02", all(0.98 <= r <= 1.02 for r in ratios or [0]),
         f"{min(ratios, default=0):.4f}-{max(ratios, default=0):.4f} in {len(ratios)} records"),
        ("no request of TRL failed", retries == 0, f"{retries:.0f} retries"),
        ("one file per policy name", bool(watch.hashes) and not mixed,
         f"{len(watch.hashes)} names, {len(mixed)} mixed"),
        ("nothing left running", not left, f"{len(left)} processes {left or ''}".rstrip()),
    ]  # fmt: skip


def report(done: collections.Counter, watch: Watch, results: list[tuple[str, bool, str]]) -> bool:
    """Print the tables; returns whether every check holds."""
    say("\nsurvived")
    for harm in HARMS:
        say(f"  {harm:<26}{done[harm]:>4}")
    total = watch.past + watch.proxy
    counts = ", ".join(f"{total[name]} {name}" for name in COUNTS)
    say(f"\nthe proxies: {counts}\n\nchecked")
    for what, holds, found in results:
        say(f"  {what:<26}{'yes' if holds else 'NO':>4}  {found}")
    return all(holds for _, holds, _ in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10, help="how long harm is done, from the first step on"
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10_000), help="of the harms (default: any)"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of the run (default: 16 per minute)"
    )
    parser.add_argument(
        "--every", type=float, default=15, help="seconds between two harms, on average"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run must not outlive this
    steps = options.steps or round(16 * options.minutes)
    say(f"[chaos] seed {options.seed}: {options.minutes:g} minutes of harm, {steps} steps")
    name = f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    with LocalRun(name, steps, lag=1, ATTEMPTS="50", SAVE_STEPS="8") as run, Watch(run) as watch:
        run.reaches(run.last_step, "the first step", FINISH_S)
        done = storm(run, plan(options.seed, options.every), options.minutes * 60)
        say(f"[chaos] no more harm; step {run.last_step()} of {steps}")
        if not run.ends_within(FINISH_S):
            say(f"[chaos] not finished within {FINISH_S} s")
    return 0 if report(done, watch, checks(run, watch)) else 1


if __name__ == "__main__":
    sys.exit(main())
