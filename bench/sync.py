"""What a weight sync costs: the write-up's blocking and pausing, and ours, with real TRL and vLLM.

    python bench/sync.py [--steps 64] [--lag 3]        # about 12 minutes on two cores, as root

Three local runs of the recipe with the same constants, one after the other:

    blocking   two replicas behind a mount that lags, bench/blocking_proxy.py: a sync pauses all
               until all have it
    ours       two replicas behind the same mount, proxy.py
    single     one replica that sees the bucket at once, and no proxy: TRL's own requests reach vLLM

You should see TRL's own figures side by side, then what was claimed and whether it holds. A sync in
TRL is: pause, wait for all GPU processes, gather and save the adapter (`saving`), load, resume;
what is beyond `saving` is what serving adds. This small model at times makes four steps in less
than the mount's lag; such a sync waits until the adapter before it is everywhere, which shows in
the maximum. Exit code 0: every claim holds."""

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import requests
from chaos import ROOT, LocalRun, end, replica_here, say, start

TOKEN = "hf_local"  # launch.sh --local's
START_S, RUN_S = 600, 1800  # s for a run to make its first step, and its last
BLOCKING = str(ROOT / "bench/blocking_proxy.py")
BLOCKING = f"import runpy\nrunpy.run_path({BLOCKING!r}, run_name='__main__')\n"


def hit_rate(urls: list[str]) -> float:
    """Share of all prompt tokens that vLLM found in its prefix cache, over replicas."""
    counts = {"hits": 0.0, "queries": 0.0}
    for url in urls:
        text = requests.get(
            f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        ).text
        for kind in counts:
            counts[kind] += sum(
                map(float, re.findall(rf"^vllm:prefix_cache_{kind}_total{{.*}} (\S+)$", text, re.M))
            )
    return counts["hits"] / counts["queries"]


def measures(history: list[dict], found: float) -> dict[str, float]:
    """The table's column, from what TRL logged (one dict per step) and the hit rate."""
    synced = [log for log in history if "perf/weight_sync_s" in log]
    syncs, saves = (
        [log[f"perf/weight_sync_{part}"] for log in synced] for part in ("s", "transfer_s")
    )
    beyond = [s - save for s, save in zip(syncs[1:], saves[1:], strict=True)]
    seconds = sum(log["perf/step_s"] for log in history[1:])
    ratios = [log["ratio"] for log in history]
    return {
        "first sync, s": syncs[0],
        "sync, s (p50)": statistics.median(syncs[1:]),
        "saving, s (p50)": statistics.median(saves[1:]),
        "beyond saving, s (p50)": statistics.median(beyond),
        "beyond saving, s (max)": max(beyond),
        "prefix cache hit rate": found,
        "steps per hour": (len(history) - 1) * 3600 / seconds,
        "ratio, min": min(ratios),
        "ratio, max": max(ratios),
    }


def watch(run, urls) -> dict[str, float]:
    """Follow a run to its last step, and read the caches' counters before anything else asks the
    replicas."""
    for step, seconds in ((1, START_S), (run.steps, RUN_S)):
        if not run.reaches(lambda step=step: run.last_step() >= step, f"step {step}", seconds):
            raise SystemExit(
                f"[sync] {run.name} ended at step {run.last_step()}: see {run.launch_log}"
            )
    found = hit_rate(urls())
    run.reaches(lambda: len(run.history()) == run.steps, "the last checkpoint", 60)
    result = measures(run.history(), found)
    run.ends_within(120)
    say(f"[sync] {run.name}: done")
    return result


def launched(name: str, steps: int, lag: float, tree: Path = ROOT) -> dict[str, float]:
    # POLL_S: every look at the Jobs starts `hf`, whose imports take a core from the trainer
    # meanwhile
    with LocalRun(name, steps, lag, tree, EVAL_DATASET="", POLL_S="20") as run:
        return watch(
            run, lambda: [job["status"]["exposeUrls"][0] for job in run.jobs("replica", "RUNNING")]
        )


def blocking(name: str, steps: int, lag: float) -> dict[str, float]:
    """The same run from a copy of the scripts in which proxy.py is the blocking one."""
    tree = ROOT / ".local" / f"{name}-tree"
    # It shares this tree's installation, which must be there by now.
    subprocess.run([ROOT / "local/install.sh"], check=True, timeout=1800)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    (tree / "proxy.py").write_text(BLOCKING)
    (tree / ".local").mkdir()
    for shared in ("venv", "tiny"):
        (tree / ".local" / shared).symlink_to(ROOT / ".local" / shared)
    return launched(name, steps, lag, tree)


class SingleRun(LocalRun):
    """The trainer and one replica as plain processes: TRL's requests go straight to vLLM. Its
    scoreboard asks the proxy and so fails after the last checkpoint, which has all that is needed
    here."""

    def __enter__(self):
        here = ROOT / ".local"
        self.output.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            self.proxy = stack.enter_context(replica_here(self.launch_log.with_suffix(".vllm")))
            env = self.env | {
                "PATH": f"{here / 'venv/bin'}:{os.environ['PATH']}", "MODEL": f"{here}/tiny/model",
                "DATASET": f"{here}/tiny/sums", "EVAL_DATASET": "", "MAX_STEPS": str(self.steps),
                "MOUNT": str(self.output.parent), "PROXY_PORT": self.proxy.rpartition(":")[2],
                "TRACKIO_DIR": f"{here}/trackio", "TRL_EXPERIMENTAL_SILENCE": "1",
                "MAX_STALENESS": "4", "LORA_RANK": "1", "CONTEXT": "4096",  # as launch.sh has them
            }  # fmt: skip
            self.process = start(
                ["torchrun", "--nproc-per-node", "2", "local/cpu_train.py"], self.launch_log, env
            )
            stack.callback(end, self.process, grace=30)
            self.children = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.children.close()

    def log(self) -> str:
        return self.launch_log.read_text()


def single(name: str, steps: int) -> dict[str, float]:
    with SingleRun(name, steps) as run:
        return watch(run, lambda: [run.proxy])


def report(columns: dict[str, dict[str, float]]) -> bool:
    """Print the table and the claims; returns whether they hold."""
    a, b, c = columns["blocking"], columns["ours"], columns["single"]
    say(f"\n{'':24}{'blocking':>10}{'ours':>10}{'single':>10}{'blocking : ours':>18}")
    for row, value in a.items():
        ratio = "" if "ratio" in row else f"{value / b[row]:.2f}"
        say(f"{row:24}{value:10.4g}{b[row]:10.4g}{c[row]:10.4g}{ratio:>18}")
    same = all(
        0.98 <= column[row] <= 1.02
        for column in columns.values()
        for row in ("ratio, min", "ratio, max")
    )
    claims = {
        "ours: a sync costs TRL its own save time + 0.1 s at most": b["beyond saving, s (p50)"]
        <= 0.1,
        "ours: prefix cache hit rate >= single x 0.95": b["prefix cache hit rate"]
        >= 0.95 * c["prefix cache hit rate"],
        "ratio within 0.98-1.02 everywhere": same,
    }
    say()
    for claim, holds in claims.items():
        say(f"  {claim:<60}{'yes' if holds else 'NO'}")
    return all(claims.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=64, help="optimizer steps of each run; a sync every 4"
    )
    parser.add_argument(
        "--lag", type=float, default=3, help="seconds by which the replicas' mounts are late"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run must not outlive this
    name = f"sync-{time.strftime('%Y%m%d-%H%M%S')}"
    return 0 if report({
        "blocking": blocking(f"{name}-blocking", options.steps, options.lag),
        "ours": launched(f"{name}-ours", options.steps, options.lag),
        "single": single(f"{name}-single", options.steps),
    }) else 1  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
