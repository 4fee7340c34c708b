"""The recipe over an S3-compatible bucket, real FUSE mounts: the trainer writes one, the replicas
read the other."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from chaos import free_port

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def mounts(tmp_path):
    """(directory of the writer's buckets, of the readers'): `local/lora` in each is a mount of one
    S3 bucket."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("NOT TESTED: the recipe over S3 mounts needs /dev/fuse, which is missing here")
    if not (shutil.which("rclone") and shutil.which("fusermount3")):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            pytest.skip(
                "NOT TESTED: the recipe over S3 mounts needs `apt-get install rclone fuse3`"
            )
        subprocess.run(["apt-get", "update", "-qq"], check=True, timeout=300)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "rclone", "fuse3"], check=True, timeout=300
        )
    writer, reader = tmp_path / "writer/local/lora", tmp_path / "reader/local/lora"
    writer.mkdir(parents=True)
    reader.mkdir(parents=True)
    command = [
        sys.executable,
        ROOT / "bench/bucket.py",
        "--hold",
        writer,
        reader,
        "--tool",
        "rclone",
    ]
    held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert "mounted" in held.stdout.readline()
        yield writer.parents[1], reader.parents[1]
    finally:
        held.stdin.close()
        try:
            held.wait(timeout=60)
        finally:
            held.kill()


def test_the_recipe_runs_on_s3_mounts(mounts):
    writer, reader = mounts
    run = f"s3-{os.getpid()}"
    # the scripts are no part of the question
    (reader / f"local/{run}-code").symlink_to(writer / f"local/{run}-code")
    environment = os.environ | {"RUN": run, "MAX_STEPS": "24", "LOCAL_BUCKETS": str(writer)}
    environment |= {"LOCAL_READER_BUCKETS": str(reader), "PROXY_PORT": str(free_port())}
    done = subprocess.run(
        ["./launch.sh", "--local"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    board = json.loads((writer / "local/lora" / run / "scoreboard.json").read_text())
    assert board["steps"] == 24 and board["syncs"] >= 6
    assert 0.98 <= board["ratio_min"] <= board["ratio_max"] <= 1.02
    assert board["routing"]["ejected"] == 0
    final = reader / "local/lora" / run / "final-adapter/adapter_model.safetensors"
    assert (
        final.read_bytes()
        == (writer / "local/lora" / run / "final-adapter/adapter_model.safetensors").read_bytes()
    )
