"""Reads a run that has ended: table beside the write-up's runs, picture, the adapter's model card.

    python bench/report.py DIRECTORY    # the run's directory in the bucket; a few seconds

DIRECTORY is `.local/buckets/local/lora/RUN` after a local run, which ends with this command, or
what `hf buckets sync hf://buckets/me/lora/RUN DIRECTORY` fetched. You should see the table;
report.png is written beside scoreboard.json, and final-adapter/README.md, PEFT's model card, gets
the data set and the figures. Needs matplotlib and huggingface_hub.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib
from huggingface_hub import ModelCard

matplotlib.use("Agg")
from matplotlib import pyplot

HEADING = "## Asynchronous GRPO with a rank-1 LoRA"
WRITE_UP = {  # runs 1 and 5, on H200s
    "steps": (500, 500),
    "wall_s": (12420, 3180),
    "reward_first": (0.145, 0.145),
    "reward_last": (0.438, 0.416),
    "ratio_min": (0.9993, None),
    "ratio_max": (1.0004, None),
    "step_s_p50": (22.9, 4.8),
    "fwd_bwd_s_p50": (21.9, 4.6),
    "weight_sync_s_p50": (8.5, 6.2),
    "staleness_mean": (1.5, 2.0),
    "samples_trained": (None, 84078),
    "replicas": (2, 3),
}


def table(board: dict) -> str:
    """The scoreboard's numbers beside the write-up's runs 1 and 5."""

    def cell(value):
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [f"{'':<24}{'this run':>12}{'run 1':>12}{'run 5':>12}   (the write-up's, on H200s)"]
    for key, value in board.items():
        if isinstance(value, int | float):
            cells = [cell(value), *map(cell, WRITE_UP.get(key, (None, None)))]
            lines.append((f"{key:<24}" + "".join(f"{text:>12}" for text in cells)).rstrip())
    return "\n".join(lines)


def history(directory: Path) -> list[dict]:
    """TRL's metrics, one dict per optimizer step, as the newest checkpoint keeps them."""
    states = directory.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: int(path.parent.name.rpartition("-")[2]))
    return [log for log in json.loads(newest.read_text())["log_history"] if "ratio" in log]


def picture(logs: list[dict], title: str, path: Path):
    """Six panels over the steps: reward, ratio, seconds, queue, staleness, syncs."""

    def column(key, missing=math.nan):
        return [missing if log.get(key) is None else log[key] for log in logs]

    steps, reward = column("step"), column("reward")
    fig, ((a, b, c), (d, e, f)) = pyplot.subplots(2, 3, figsize=(15, 7), layout="constrained")
    fig.suptitle(title)
    a.plot(steps, reward, color="lightsteelblue", label="per step")
    means = [statistics.mean(reward[max(0, i - 19) : i + 1]) for i in range(len(reward))]
    a.plot(steps, means, color="navy", label="mean of 20 steps")
    a.legend(frameon=False)
    a.set(title="reward")
    b.plot(steps, column("ratio"), color="seagreen")
    b.axhline(1, color="grey", linewidth=0.8)
    b.set(title="ratio of trainer to replica probabilities")
    parts = ("perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_s")
    names = ("forward + backward", "waiting for rollouts", "weight sync")
    c.stackplot(steps, *[column(part, 0) for part in parts], labels=names)
    c.legend(frameon=False)
    c.set(title="seconds per step")
    d.plot(steps, column("sample/rollout_queue_size"), color="darkorange")
    d.set(title="samples waiting in the queue")
    e.plot(steps, column("sample/staleness_mean"), color="purple")
    e.set(title="staleness of samples (policies), mean")
    syncs = [(step, s) for step, s in zip(steps, column(parts[2], 0), strict=True) if s]
    f.bar([step for step, _ in syncs], [s for _, s in syncs], width=2, color="teal")
    f.set(title="seconds per weight sync")
    for axes in fig.axes:
        axes.set(xlabel="optimizer step")
    fig.savefig(path, dpi=80)


def complete_card(path: Path, board: dict):
    card = ModelCard.load(path)
    if HEADING not in card.text:
        if not Path(board["dataset"]).exists():  # a data set of the Hub
            card.data.datasets = [board["dataset"]]
        figures = json.dumps(board, indent=1)
        card.text += f"\n\n{HEADING}\n\nTrained on {board['dataset']}:\n\n```json\n{figures}\n```\n"
        card.save(path)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/report.py DIRECTORY")
    directory = Path(sys.argv[1])
    try:
        board = json.loads((directory / "scoreboard.json").read_text())
        logs = history(directory)
    except (OSError, ValueError) as error:
        sys.exit(f"[report] {directory} is not the directory of a run that has ended: {error}")
    sys.stdout.write(f"{table(board)}\n")
    sys.stdout.flush()
    picture(
        logs, f"{directory.name}: {board['model'].rpartition('/')[2]}", directory / "report.png"
    )
    complete_card(directory / "final-adapter/README.md", board)
    sys.stdout.write(f"[report] drawn: {directory}/report.png\n")


if __name__ == "__main__":
    main()
