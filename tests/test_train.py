"""train.py without a run: reading the pipeline, checkpoints, numbering, the scoreboard's parts."""

import json
import os

import pytest

import train

RECIPE = {"sync_steps": 4, "token_budget": 16384, "gradient_checkpointing": False}
RECIPE |= {"queue_size": 512, "max_inflight": 128}


@pytest.mark.parametrize(
    ("changed", "bottleneck", "constant"),
    [
        # The write-up's five runs: what their authors read, and the constant that they turned next.
        (
            {"step_s": 22.9, "fwd_bwd_s": 21.9, "weight_sync_s": 8.5, "queue": 476, "token_budget": 0,
             "rollout_wait_s": 0.0, "gradient_checkpointing": True, "inflight": 128},
            "trainer-bound", "TOKEN_BUDGET",
        ),
        (
            {"step_s": 5.9, "fwd_bwd_s": 5.6, "gradient_checkpointing": True},
            "trainer-bound", "GRADIENT_CHECKPOINTING",
        ),
        # A sync of 7.6 s every four steps was a quarter of the wall clock: a step took 7.6 s.
        ({"step_s": 7.6, "fwd_bwd_s": 4.6, "weight_sync_s": 7.6}, "generation-bound", "REPLICAS"),
        # The third replica idle, in flight stuck at 128.
        ({"step_s": 6.9, "fwd_bwd_s": 4.6, "weight_sync_s": 5.8, "inflight": 128}, "in-flight-capped", "MAX_INFLIGHT"),
        (
            {"step_s": 4.8, "fwd_bwd_s": 4.6, "rollout_wait_s": 0.0, "inflight": 300, "max_inflight": 384,
             "queue_size": 768},
            "balanced", "nothing",
        ),
        ({"step_s": 6.0, "fwd_bwd_s": 4.6, "weight_sync_s": 5.6, "rollout_wait_s": 0.0}, "sync-bound", "SYNC_STEPS"),
        ({"step_s": 4.8, "fwd_bwd_s": 4.7, "rollout_wait_s": 0.0, "queue": 511}, "trainer-bound", "GPUs"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named(changed, bottleneck, constant):
    name, advice = train.diagnose(RECIPE | changed)
    assert name == bottleneck
    assert constant in advice
    assert f"step {changed['step_s']:.1f} s" in advice  # the figures behind it


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "OUTPUT_DIR", str(tmp_path))
    return tmp_path


def checkpoint(output, step, files=(("model/.metadata", 10), ("model/__0_0.distcp", 100), ("trainer_state.json", 50))):
    directory = output / f"checkpoint-{step}"
    for name, size in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x" * size)
    (directory / "manifest.json").write_text(json.dumps(dict(files)))
    return directory


def test_the_newest_complete_checkpoint_is_taken_by_number(output):
    for step in (50, 100, 950, 1000):
        checkpoint(output, step)
    assert train.newest_checkpoint() == str(output / "checkpoint-1000")


@pytest.mark.parametrize("damage", ["manifest.json", "model/.metadata", "trainer_state.json"])
def test_an_incomplete_checkpoint_is_skipped_with_a_line(output, capsys, damage):
    checkpoint(output, 50)
    (checkpoint(output, 100) / damage).unlink()
    assert train.newest_checkpoint(deadline_s=0) == str(output / "checkpoint-50")
    assert f"skipped {output}/checkpoint-100: incomplete, {damage}" in capsys.readouterr().out
    assert not (output / "checkpoint-100").exists()  # nothing of it can mix with what is written there next


def test_a_file_cut_short_is_noticed(output):
    (checkpoint(output, 50) / "model/__0_0.distcp").write_bytes(b"x" * 99)
    assert train.newest_checkpoint(deadline_s=0) is None


def test_a_late_file_is_waited_for(output):
    directory = checkpoint(output, 50)
    late = directory / "trainer_state.json"
    os.rename(late, output / "aside")
    calls = []

    def appear(seconds):
        calls.append(seconds)
        os.rename(output / "aside", late)

    train.time.sleep, sleep = appear, train.time.sleep
    try:
        assert train.newest_checkpoint(deadline_s=5) == str(directory)
    finally:
        train.time.sleep = sleep
    assert calls


def test_numbering_goes_on_after_the_highest_version_ever_published(output):
    assert train.highest_published_version() == 0
    for name in ("trl-policy-v9", "trl-policy-v10", ".trl-policy-v11.tmp"):  # the last was never published
        (output / ".vllm_lora" / name).mkdir(parents=True)
    assert train.highest_published_version() == 10


def test_interval_is_wilsons():
    # Values of scipy.stats.binomtest(8, 10).proportion_ci(method="wilson") and of (0, 20).
    assert train.interval(8, 10) == pytest.approx([0.4902, 0.9433], abs=1e-3)
    assert train.interval(0, 20) == pytest.approx([0.0, 0.1611], abs=1e-3)


HISTORY = [
    {
        "step": step, "reward": 0.3 + step / 100, "ratio": 1.0, "perf/step_s": 2.0, "perf/fwd_bwd_s": 1.5,
        "perf/rollout_wait_s": 0.1, "sample/rollout_queue_size": 90.0, "sample/staleness_mean": 1.0,
        "batch/samples_per_step": 72.0, "rollout/inflight": 64.0, "wall_s": 2.0 * step,
    }
    | ({"perf/weight_sync_s": 0.2} if step % 4 == 0 or step == 1 else {})
    for step in range(1, 31)
]  # fmt: skip


def test_scoreboard_table_and_picture(output, monkeypatch):
    stats = {"replicas": [{}, {}, {}], "adapters": {}, "routed": 240, "affinity": 200}

    class Answer:
        json = staticmethod(lambda: dict(stats))

    monkeypatch.setattr(train.requests, "get", lambda url, timeout: Answer)
    board = train.scoreboard(HISTORY, "/lora/run/final-adapter")
    assert board["steps"] == 30 and board["samples_trained"] == 30 * 72 and board["replicas"] == 3
    assert board["reward_first"] == pytest.approx(0.355) and board["reward_last"] == pytest.approx(0.555)
    assert board["weight_sync_s_first"] == 0.2 and board["syncs"] == 8 and board["wall_s"] == 60.0
    assert board["routing"] == {"routed": 240, "affinity": 200}
    lines = train.table(board).splitlines()
    assert lines[0].split() == ["this", "run", "post,", "run", "1", "post,", "run", "5"]
    assert next(line for line in lines if line.startswith("step_s_p50")).split() == ["step_s_p50", "2", "22.9", "4.8"]
    train.picture(HISTORY, f"{output}/scoreboard.png")
    assert (output / "scoreboard.png").stat().st_size > 20_000
