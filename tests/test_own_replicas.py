"""Machines that are not Jobs, real from end to end: two replicas of `serve.sh here` that ask for a
key, and `launch.sh trainer` with REPLICA_URLS (three minutes)."""

import contextlib
import json
import os
import pathlib
import subprocess
import time

import pytest
import requests
from chaos import free_port, replica_here

ROOT = pathlib.Path(__file__).parents[1]
LOCAL = ROOT / ".local"
KEY = "a-key-of-my-own"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """URLs of two real replicas that answer, and ask for the key."""
    logs = tmp_path_factory.mktemp("replicas")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                replica_here(logs / f"replica-{seed}.log", SEED=seed, VLLM_API_KEY=KEY)
            )
            for seed in ("1", "2")
        ]


def trainer(replicas, run, mount, scratch, **changed):
    """(command, environment) of `launch.sh trainer` with those replicas."""
    path = f"{LOCAL / 'venv/bin'}:{os.environ['PATH']}"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JOB_ID", "HF_TOKEN")
    }
    environment |= {"PATH": path, "RUN": run, "MOUNT": str(mount), "MAX_STEPS": "6", "RANKS": "2"}
    environment |= {
        "REPLICA_URLS": ",".join(replicas),
        "VLLM_API_KEY": KEY,
        "PROXY_PORT": str(free_port()),
    }
    environment |= {
        "MODEL": str(LOCAL / "tiny/model"),
        "DATASET": str(LOCAL / "tiny/sums"),
        "EVAL_DATASET": "",
    }
    environment |= {
        "TRAIN_SCRIPT": "local/cpu_train.py",
        "TRACKIO_DIR": str(scratch / "trackio"),
        "POLL_S": "2",
    }
    return ["./launch.sh", "trainer"], environment | changed


def test_the_trainer_runs_with_replicas_of_ones_own(replicas, tmp_path):
    assert [requests.get(f"{url}/v1/models", timeout=30).status_code for url in replicas] == [
        401,
        401,
    ]
    command, environment = trainer(replicas, "own", tmp_path, tmp_path)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert KEY not in done.stdout + done.stderr
    board = json.loads((tmp_path / "own/scoreboard.json").read_text())
    assert board["steps"] == 6 and board["replicas"] == 2 and board["routing"]["ejected"] == 0
    assert (tmp_path / "own/final-adapter/adapter_model.safetensors").is_file()


@pytest.fixture
def small_bucket(tmp_path):
    """A directory that takes 16 MB, as the bucket."""
    mount = tmp_path / "bucket"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "bucket", mount], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"NO TEST OF A FULL BUCKET HERE, for nothing can be mounted: {made.stderr}")
    yield mount
    subprocess.run(
        ["umount", "--lazy", mount], check=True, timeout=30
    )  # the replicas have its adapters mapped


def test_a_bucket_that_refuses_a_save_stops_the_training_and_keeps_the_checkpoints(
    replicas, small_bucket, tmp_path
):
    output, log = small_bucket / "full", tmp_path / "log"
    command, environment = trainer(
        replicas, "full", small_bucket, tmp_path, MAX_STEPS="400", SAVE_STEPS="4"
    )
    with open(log, "w") as out:
        launch = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 300
        while not list(output.glob("checkpoint-*/manifest.json")):
            assert launch.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        with (
            open(small_bucket / "somebody-elses", "wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(4096))
        assert launch.wait(timeout=120) != 0
    finally:
        launch.terminate()
        launch.wait(timeout=60)
    said = log.read_text()
    assert "No space left on device" in said, said[-3000:]
    assert "[launch] local/cpu_train.py failed, as it says above; RUN=full resumes" in said
    whole = {path.parent for path in output.glob("checkpoint-*/manifest.json")}
    assert whole and all(
        (checkpoint / name).stat().st_size == size
        for checkpoint in whole
        for name, size in json.loads((checkpoint / "manifest.json").read_text())["files"].items()
    )
