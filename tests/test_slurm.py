"""slurm/run.sbatch with a real Slurm: Debian's slurmctld, slurmd and munged, which this file starts
and ends, on ports and in a directory of its own. Two nodes, their CPUs, memory and GPUs are
fictitious; vLLM, TRL and the small model are real.

python -m pytest tests/test_slurm.py        # five minutes, as root; ten on a busy machine
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest
from chaos import free_port

ROOT = Path(__file__).resolve().parents[1]
LOCAL = ROOT / ".local"
TREE = ("train.py", "proxy.py", "serve.sh", "launch.sh", "requirements.txt")
TREE += ("local", "bench", "slurm")
DEADLINE_S = 300  # for anything a test waits for, on two busy cores
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
# cred_expire: also how long a requeued job waits before it starts again; by default 120 s
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
# seconds between two looks at the queue; by default 30
SchedulerParameters=bf_interval=3
FirstJobId={first}
GresTypes=gpu
NodeName=DEFAULT CPUs=16 RealMemory=64000 Gres=gpu:4
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def call(*command, env=None, cwd=None, timeout=60):
    """What it says; it must succeed."""
    done = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def until(condition, what, seen=lambda: ""):
    """The condition's value, once it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}\n{seen()}"
        time.sleep(0.5)
    return value


def processes(variable):
    """{pid: its environment} of the processes that have `NAME=value` in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace").split("\0")
            if variable in words:
                found[int(path.parent.name)] = dict(word.partition("=")[::2] for word in words)
    return found


def install():
    """Slurm, by apt, if it is not there."""
    if all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in DAEMONS):
        return
    if os.getuid() == 0 and shutil.which("apt-get"):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for command in (["update"], ["install", "-y", "slurm-wlm", "munge"]):
            done = subprocess.run(
                ["apt-get", "-q", *command], env=quiet, capture_output=True, text=True, timeout=300
            )
        if done.returncode == 0:
            return
        pytest.skip(f"NO TEST OF SLURM HERE: apt-get fails: {done.stderr[-500:]}")
    pytest.skip("NO TEST OF SLURM HERE: slurm-wlm and munge are not installed, and not as root")


class Slurm:
    """The three daemons, and jobs of slurm/run.sbatch in a copy of the scripts."""

    def __init__(self, folder):
        self.folder, self.tree = folder, folder / "tree"
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.env["PATH"] = f"/usr/sbin:{self.env['PATH']}"
        for name in [name for name in self.env if name in ("HF_TOKEN", "JOB_ID", "JOB_PORT")]:
            del self.env[name]

    def start(self):
        for name in ("munge", "state", "tree", "lora"):
            (self.folder / name).mkdir(mode=0o755)
        for name in TREE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.tree / name)
        for number in range(4):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        fill = {"folder": self.folder, "host": socket.gethostname().partition(".")[0]}
        fill |= {name: free_port() for name in ("port", "port_1", "port_2")}
        fill["first"] = self.free_job_id()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**fill))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-3]\n")
        munge = {"key-file": key, "socket": "socket", "pid-file": "../munged.pid"}
        munge |= {"log-file": "../munged.log", "seed-file": "seed"}
        words = [f"--{name}={self.folder / 'munge' / path}" for name, path in munge.items()]
        call("munged", "--force", *words, env=self.env)
        call("slurmctld", env=self.env)
        for node in NODES:
            call("slurmd", "-N", node, env=self.env)
        up = lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)
        until(up, "the nodes", self.logs)

    @staticmethod
    def free_job_id():
        """A first job id whose ports, and those of the next ten, nobody uses."""
        while True:
            first = random.randrange(1, 980)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for port in range(10000 + first * 20, 10000 + (first + 10) * 20):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return first

    def stop(self):
        """All jobs, then the daemons, by their pid files."""
        with contextlib.suppress(Exception):
            self.ask("scancel", "--user=root")
            until(lambda: not self.ask("squeue", "-h"), "the queue to be empty")
        for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError):
                pid = int((self.folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                deadline = time.monotonic() + 20
                while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.1)

    def ask(self, *command):
        return call(*command, env=self.env)

    def logs(self):
        return "".join(path.read_text()[-3000:] for path in self.folder.glob("slurm*.log"))

    def submit(self, run, *options, **changed):
        """The id of a job whose environment is that of a local run."""
        path = f"{self.tree / 'local'}:{LOCAL / 'venv/bin'}:{self.env['PATH']}"
        environment = self.env | {"PATH": path, "RUN": run, "MOUNT": str(self.folder / "lora")}
        environment |= {
            "REPLICAS": "2",
            "MAX_STEPS": "20",
            "SAVE_STEPS": "4",
            "RANKS": "2",
            "POLL_S": "2",
            "MODEL": str(LOCAL / "tiny/model"),
            "DATASET": str(LOCAL / "tiny/sums"),
            "EVAL_DATASET": "",
            "TRAIN_SCRIPT": "local/cpu_train.py",
            "TRACKIO_DIR": str(self.folder / "trackio"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        small = ("--nodes=2", "--gpus-per-node=3", "--cpus-per-gpu=3", "--mem-per-gpu=4G")
        command = ["sbatch", "--parsable", *small, *options, "slurm/run.sbatch"]
        return call(*command, env=environment | changed, cwd=self.tree)

    def said(self, job):
        paths = sorted(self.tree.glob(f"slurm-{job}*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in paths)

    def log(self, job):
        path = self.tree / f"slurm-{job}.log"
        return path.read_text() if path.exists() else ""

    def job(self, job):
        """What Slurm knows about it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)))

    def says(self, job, text):
        """Wait for a line of its log."""
        there = lambda: text in self.log(job)
        done = lambda: there() or self.job(job)["JobState"] in ENDED
        until(done, text, lambda: self.said(job))
        assert there(), self.said(job)

    def ends(self, job, state):
        """Wait until it has, and until nothing of it is left."""
        ended = lambda: self.job(job)["JobState"] in ENDED
        until(ended, f"job {job} to end", lambda: self.said(job))
        known = self.job(job)
        assert known["JobState"] == state, self.said(job) + self.logs()
        until(lambda: not processes(f"SLURM_JOB_ID={job}"), f"the end of all of job {job}")
        return known


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    install()
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def test_a_job_that_is_requeued_resumes_from_its_newest_checkpoint(slurm):
    output = slurm.folder / "lora/again"
    job = slurm.submit("again")
    manifest = lambda: list(output.glob("checkpoint-*/manifest.json"))
    until(lambda: manifest() or slurm.job(job)["JobState"] == "FAILED", "a checkpoint",
          lambda: slurm.said(job))  # fmt: skip
    assert manifest(), slurm.said(job)
    # The trainer and a replica share a node, and each has GPUs of its own; the other replica has
    # the second node. TRL takes the GPUs from its rollout process.
    running = processes(f"SLURM_JOB_ID={job}").values()
    names = ("SLURMD_NODENAME", "SLURM_STEP_ID", "CUDA_VISIBLE_DEVICES")
    steps = {tuple(map(env.get, names)) for env in running if all(map(env.get, names))}
    given = {node: ",".join(gpus for n, _, gpus in steps if n == node) for node in NODES}
    steps = sorted((node, len(gpus.split(","))) for node, _, gpus in steps)
    assert steps == [("n1", 1), ("n1", 2), ("n2", 1)], steps
    assert len(set(given["n1"].split(","))) == 3, given
    [key] = {env["VLLM_API_KEY"] for env in running if "VLLM_API_KEY" in env}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert key not in path.read_text(errors="replace")
    slurm.ask("scontrol", "requeue", job)
    slurm.says(job, "[train] resuming from")
    known = slurm.ends(job, "COMPLETED")
    said = slurm.log(job)
    assert known["Restarts"] == "1" and known["ExitCode"] == "0:0"
    assert re.search(r"\[train\] resuming from \S+/again/checkpoint-(4|8|12|16)\b", said), said
    assert said.count("the replicas are ready") == 2 and key not in slurm.said(job)
    board = json.loads((output / "scoreboard.json").read_text())
    assert board["steps"] == 20 and board["replicas"] == 2
    assert re.search(r"^steps +20 +500 +500", said, re.MULTILINE), said


def test_a_run_goes_on_without_a_replica_and_scancel_leaves_nothing(slurm):
    job = slurm.submit("cancelled")
    slurm.says(job, "the replicas are ready")
    running = processes(f"SLURM_JOB_ID={job}").values()
    [step] = {env.get("SLURM_STEP_ID") for env in running if env.get("SEED") == "1"} - {None}
    slurm.ask("scancel", f"{job}.{step}")
    slurm.says(job, "1 out: ")  # the port of replica 1 ends so
    slurm.says(job, "[train] step    2/20")
    assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.ask("scancel", job)
    slurm.ends(job, "CANCELLED")
    assert not slurm.ask("squeue", "-h")


def test_the_exit_code_is_the_trainers_and_the_replicas_end_with_it(slurm):
    job = slurm.submit("fails", TRAIN_SCRIPT="nowhere.py")
    assert slurm.ends(job, "FAILED")["ExitCode"] == "1:0"
    assert "no replica is started" in slurm.log(job)
    job = slurm.submit("many", REPLICAS="5")
    assert slurm.ends(job, "FAILED")["ExitCode"] == "2:0"
    assert "2 x 3 GPUs: 2 on one node and 5 more are needed" in slurm.log(job)
    job = slurm.submit("nowhere", MOUNT="/nowhere")
    assert slurm.ends(job, "FAILED")["ExitCode"] == "2:0"
    assert "MOUNT='/nowhere': a directory that all nodes see is expected" in slurm.log(job)
