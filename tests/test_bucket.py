"""Mounts: the lagging mirror, and rclone and s3fs with the robust flags of bench/bucket.py. A
minute on two idle cores.

python -m pytest tests/test_bucket.py
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "local")]
import mirror  # noqa: E402

from bench import bucket  # noqa: E402

CONFIG, WEIGHTS = bucket.CONFIG, bucket.WEIGHTS
LAG_S = 1.0


# --------------------------------------------------------------------------------------- the mirror
class Watched(mirror.Mirror):
    """A mirror that looks when it is told to; `seen` is how its v1 looked after each change."""

    def __init__(self, folder: Path, monkeypatch, torn: bool = False):
        source, target, self.now = folder / "source", folder / "target", 0.0
        source.mkdir()
        target.mkdir()
        monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(source, target, LAG_S, torn)
        self.lora, self.shown, self.seen = source / ".vllm_lora", target / ".vllm_lora", [{}]

    def publish(self, path: str, action: str):
        super().publish(path, action)
        if (now := sizes(self.shown / "v1")) != self.seen[-1]:
            self.seen.append(now)

    def at(self, seconds: float) -> dict[str, int]:
        """How v1 looks then."""
        self.now = seconds
        self.poll()
        return sizes(self.shown / "v1")


def publish(lora: Path, name: str):
    """As TRL does: a staging directory, then a rename."""
    staging = lora / f".{name}.tmp"
    staging.mkdir(parents=True)
    (staging / WEIGHTS).write_bytes(b"w" * 1000)
    (staging / CONFIG).write_text("{}")
    staging.rename(lora / name)


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}


def test_mirror_shows_everything_after_the_lag_and_deletes_as_late(tmp_path, monkeypatch):
    mirror = Watched(tmp_path, monkeypatch)
    publish(mirror.lora, "v1")
    assert mirror.at(10) == mirror.at(10.9) == {}
    assert mirror.at(11) == {WEIGHTS: 1000, CONFIG: 2}
    # a config without its weights is what vLLM answers with a 500
    assert mirror.seen == [{}, {WEIGHTS: 1000}, {WEIGHTS: 1000, CONFIG: 2}]

    (mirror.lora / "v1" / CONFIG).write_text('{"r": 1}')
    assert mirror.at(20) == mirror.at(20.9) == {WEIGHTS: 1000, CONFIG: 2}
    assert mirror.at(21) == {WEIGHTS: 1000, CONFIG: 8}

    shutil.rmtree(mirror.lora / "v1")
    assert mirror.at(30) == mirror.at(30.9) == {WEIGHTS: 1000, CONFIG: 8}
    assert mirror.at(31) == {} and not (mirror.shown / "v1").exists()
    assert sizes(mirror.shown) == {}  # no staging names either


def test_torn_mirror_shows_config_then_half_the_weights_then_all(tmp_path, monkeypatch):
    mirror = Watched(tmp_path, monkeypatch, torn=True)
    publish(mirror.lora, "v1")
    assert mirror.at(10) == mirror.at(10.9) == {}
    assert mirror.at(11) == mirror.at(11.4) == {CONFIG: 2}
    assert mirror.at(11.5) == mirror.at(11.9) == {CONFIG: 2, WEIGHTS: 500}
    assert mirror.at(12) == {CONFIG: 2, WEIGHTS: 1000}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_mirror_runs_until_it_is_told_to_end(tmp_path, signum):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    command = [sys.executable, ROOT / "local/mirror.py", source, target, "--lag", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("[mirror] ")
        for version in range(60):
            publish(source / ".vllm_lora", f"v{version}")
        whole = lambda name: sizes(target / ".vllm_lora" / name) == {WEIGHTS: 1000, CONFIG: 2}
        everything = lambda: all(whole(f"v{version}") for version in range(60))
        assert bucket.wait_for(everything, 30) is not None
        process.send_signal(signum)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(5)
        process.stdout.close()


# -------------------------------------------------------------------------------------- real mounts
@pytest.fixture(scope="session")
def mounts():
    """Skips where there is no FUSE; what else is missing is installed where that is allowed."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip(
            "NO BUCKET MOUNT TESTED: /dev/fuse is missing here "
            "(docker run --device /dev/fuse --cap-add SYS_ADMIN)"
        )
    packages = [name for name in ("rclone", "s3fs") if not shutil.which(name)]
    packages += [] if shutil.which("fusermount3") else ["fuse3"]
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", *packages]):
            subprocess.run(
                ["apt-get", *command],
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                timeout=300,
            )
    if lacks := bucket.missing(tuple(bucket.ROBUST)):
        pytest.skip(f"NO BUCKET MOUNT TESTED: missing {', '.join(lacks)}")


@pytest.fixture(scope="session")
def run(mounts):
    return bucket.Run()


@pytest.mark.parametrize("tool", sorted(bucket.ROBUST))
def test_robust_mounts_show_every_save_whole_and_lose_nothing(tool, run):
    row = bucket.measure(bucket.ROBUST[tool], run, saves=5, spacing_s=0.2, latency_s=0.01)
    assert (row.verdict, row.lost, row.third) == ("yes", [], ""), row
    assert len(row.visible_s) == 5 and max(row.visible_s) < 10, row
    # s3fs has uploaded what is closed. rclone has not, and an unmount drops it: that is why mount()
    # says so.
    assert row.unmounted == {"s3fs": "3 of 3 files", "rclone": "0 of 3 files"}[tool]


def test_a_bucket_that_refuses_loses_nothing_that_was_there(run):
    saved = bucket.refused("s3fs", "403", run, heal_s=1)
    assert "PermissionError" in saved and "intact" in saved, saved


@pytest.mark.parametrize(("tool", "end"), [("rclone", "SIGTERM"), ("s3fs", "EOF")])
def test_hold_mounts_a_pair_and_leaves_nothing(tool, end, tmp_path, mounts):
    writer, reader = tmp_path / "writer", tmp_path / "reader"
    command = [sys.executable, bucket.__file__, "--hold", writer, reader, "--tool", tool]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith(f"[bucket] mounted {tool}: ")
        (writer / "folder").mkdir()
        (writer / "folder" / "file").write_text("seen")
        assert bucket.wait_for(lambda: (reader / "folder" / "file").exists(), 10) is not None
        assert (reader / "folder" / "file").read_text() == "seen"
        with pytest.raises(OSError, match="Read-only"):
            (reader / "mine").write_text("")
        process.send_signal(signal.SIGTERM) if end == "SIGTERM" else process.stdin.close()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stdout.close()
    assert not os.path.ismount(writer) and not os.path.ismount(reader)
    assert not list(writer.iterdir())
    assert (
        subprocess.run(["pgrep", "-f", f"{tool}.*{tmp_path}"], capture_output=True).returncode == 1
    )


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path):
    command = [sys.executable, bucket.__file__, "--tool", "rclone"]
    result = subprocess.run(
        command,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "rclone (apt-get install rclone)" in result.stderr and "Traceback" not in result.stderr
