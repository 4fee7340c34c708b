"""bench/report.py on a run's directory, and the figures of train.py's scoreboard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parents[1]
LOGS = [
    {
        "step": step,
        "reward": 0.3 + step / 100,
        "ratio": 1.0,
        "perf/step_s": 2.0,
        "perf/fwd_bwd_s": 1.5,
        "perf/rollout_wait_s": 0.1,
        "sample/rollout_queue_size": 90.0,
        "sample/staleness_mean": 1.0,
        "batch/samples_per_step": 72.0,
        "rollout/inflight": 64.0,
    }
    | ({"perf/weight_sync_s": 0.2} if step % 4 == 0 or step == 1 else {})
    for step in range(1, 31)
]
CARD = "---\nlibrary_name: peft\n---\n\n# Model Card\n"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoint-30").mkdir()
    state = {"log_history": [*LOGS, {"train_runtime": 60.0}]}
    (tmp_path / "checkpoint-30/trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "final-adapter").mkdir()
    (tmp_path / "final-adapter/README.md").write_text(CARD)
    board = {"model": "some/model", "dataset": "some/data", "adapter": "final-adapter"}
    board |= train.whole_run(tmp_path / "checkpoint-30") | {"accuracy_trained": 0.5}
    (tmp_path / "scoreboard.json").write_text(json.dumps(board))
    return tmp_path


def report(*arguments):
    command = [sys.executable, ROOT / "bench/report.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_scoreboard_counts_every_step(run):
    board = json.loads((run / "scoreboard.json").read_text())
    assert board["steps"] == 30 and board["samples_trained"] == 30 * 72 and board["wall_s"] == 60.0
    assert board["reward_first"] == pytest.approx(0.355)
    assert board["reward_last"] == pytest.approx(0.555)
    assert board["ratio_min"] == board["ratio_max"] == 1.0 and board["staleness_mean"] == 1.0
    assert board["weight_sync_s_first"] == 0.2 and board["syncs"] == 8
    assert board["step_s_p50"] == 2.0 and board["bottleneck"] == "balanced"


def test_table_picture_and_model_card(run):
    done = report(run)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["step_s_p50"] == ["2", "22.9", "4.8"] and rows["accuracy_trained"] == ["0.5"]
    assert (run / "report.png").stat().st_size > 20_000
    assert report(run).returncode == 0  # twice is once
    card = (run / "final-adapter/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "datasets:\n- some/data\n" in card
    assert card.count('"reward_last": ') == 1


def test_a_directory_of_no_run_is_said_in_a_line(tmp_path):
    done = report(tmp_path)
    assert done.returncode == 1 and "not the directory of a run" in done.stderr
    assert "Traceback" not in done.stderr
    assert report().returncode == 1
