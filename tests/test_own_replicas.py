"""Machines that are not Jobs, real from end to end: two replicas of `serve.sh here` that ask for a key, and
`launch.sh trainer` with REPLICA_URLS (two minutes)."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest
import requests

ROOT = pathlib.Path(__file__).parents[1]
LOCAL = ROOT / ".local"
KEY = "a-key-of-my-own"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def replicas(tmp_path):
    """URLs of two real replicas that answer, and ask for the key."""
    if not (LOCAL / "tiny/model").is_dir():
        subprocess.run([LOCAL / "venv/bin/python", ROOT / "local/tiny_model.py", LOCAL / "tiny"], check=True)
    path = f"{ROOT / 'local'}:{LOCAL / 'venv/bin'}:{os.environ['PATH']}"
    ports, started = (free_port(), free_port()), []
    try:
        for seed, port in enumerate(ports, 1):
            environment = os.environ | {"PATH": path, "MODEL": str(LOCAL / "tiny/model"), "SEED": str(seed)}
            environment |= {"VLLM_API_KEY": KEY, "JOB_PORT": str(port)}
            with open(tmp_path / f"replica-{seed}.log", "w") as log:
                command = [ROOT / "serve.sh", "here"]
                started.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
        deadline = time.monotonic() + 300
        for process, port in zip(started, ports):
            while True:
                assert process.poll() is None and time.monotonic() < deadline, "a replica did not start"
                try:
                    if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except requests.ConnectionError:
                    time.sleep(0.5)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def test_the_trainer_runs_with_replicas_of_ones_own(replicas, tmp_path):
    assert [requests.get(f"{url}/v1/models", timeout=30).status_code for url in replicas] == [401, 401]
    path = f"{LOCAL / 'venv/bin'}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in ("JOB_ID", "HF_TOKEN")}
    environment |= {"PATH": path, "RUN": "own", "MOUNT": str(tmp_path), "MAX_STEPS": "6", "RANKS": "2"}
    environment |= {"REPLICA_URLS": ",".join(replicas), "VLLM_API_KEY": KEY, "PROXY_PORT": str(free_port())}
    environment |= {"MODEL": str(LOCAL / "tiny/model"), "DATASET": str(LOCAL / "tiny/sums"), "EVAL_DATASET": ""}
    environment |= {"TRAIN_SCRIPT": "local/cpu_train.py", "TRACKIO_DIR": str(tmp_path / "trackio"), "POLL_S": "2"}
    done = subprocess.run(
        ["./launch.sh", "trainer"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert KEY not in done.stdout + done.stderr
    board = json.loads((tmp_path / "own/scoreboard.json").read_text())
    assert board["steps"] == 6 and board["replicas"] == 2 and board["routing"]["ejected"] == 0
    assert (tmp_path / "own/final-adapter/adapter_model.safetensors").is_file()
