"""A mount that lags: mirrors a directory late, file by file, for tests and benches of slow buckets.

    python local/mirror.py SOURCE TARGET --lag 3          # prints "[mirror] ...", until SIGTERM
    python local/mirror.py SOURCE TARGET --lag 3 --torn   # and shows each directory in part first

What appears or changes in SOURCE is in TARGET `lag` seconds later; what is deleted goes as late,
and so does what only TARGET has. Files come one by one, as from an object store: without --torn
JSON (the config) last, so that what can be loaded is whole; with --torn JSON first, the others 0.5
s later, cut short at half their length, and whole after another 0.5 s. TARGET is to be read only.
"""

import argparse
import contextlib
import heapq
import os
import shutil
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.05  # between two scans of SOURCE
TORN_STEP_S = 0.5  # long enough that a replica which is asked twice per second meets each state
STAGED = ".mirror.tmp"  # in TARGET: a copy not yet renamed to its name


def skipped(name: str) -> bool:
    """Staging names: `.trl-policy-v7.tmp`, `.metadata.tmp`, safetensors' `.tmpX1`. They are renamed
    before anybody asks for them, and a mirror of their short lives would only race it. `.vllm_lora`
    and `.metadata` are real."""
    return name.startswith(".tmp") or (name.startswith(".") and name.endswith(".tmp"))


def scan(root: Path) -> dict[str, tuple]:
    """What is below `root` by relative path, each with what changes when it does (nothing, for a
    directory)."""
    found = {}
    for folder, directories, files in os.walk(root):
        directories[:] = [name for name in directories if not skipped(name)]
        found |= {os.path.relpath(os.path.join(folder, name), root): () for name in directories}
        for path in (os.path.join(folder, name) for name in files if not skipped(name)):
            # gone since it was listed: the next scan sees what became of it
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                found[os.path.relpath(path, root)] = (
                    status.st_mtime_ns,
                    status.st_size,
                    status.st_ino,
                )
    return found


class Mirror:
    def __init__(self, source: Path, target: Path, lag_s: float, torn: bool):
        self.source, self.target, self.lag_s, self.torn = source, target, lag_s, torn
        self.known: dict[str, tuple | None] = dict.fromkeys(scan(target))
        # heap of (when, order, path, what to do)
        self.due: list[tuple[float, tuple, str, str]] = []

    def poll(self) -> None:
        now, found = time.monotonic(), scan(self.source)
        for path, state in found.items():
            if self.known.get(path) != state:
                self.plan(now + self.lag_s, path, state)
        for path in self.known.keys() - found.keys():
            # The deepest first, so that a directory is empty when its turn comes.
            heapq.heappush(self.due, (now + self.lag_s, (-path.count(os.sep),), path, "delete"))
        self.known = found
        while self.due and self.due[0][0] <= now:
            _, _, path, action = heapq.heappop(self.due)
            self.publish(path, action)

    def plan(self, when: float, path: str, state: tuple) -> None:
        depth, config = path.count(os.sep), path.endswith(".json")
        if not self.torn or config or not state:
            # A directory before what is in it; of its files, the config last.
            heapq.heappush(self.due, (when, (depth, config), path, "copy"))
        else:
            heapq.heappush(self.due, (when + TORN_STEP_S, (depth,), path, "cut"))
            heapq.heappush(self.due, (when + 2 * TORN_STEP_S, (depth,), path, "copy"))

    def publish(self, path: str, action: str) -> None:
        """Do what is due, with what SOURCE holds now; what has gone since has a deletion of its own
        on the way."""
        source, target, staged = self.source / path, self.target / path, self.target / STAGED
        if action == "delete":
            if not source.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        elif source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                content = source.read_bytes()
                staged.write_bytes(content[: len(content) // 2] if action == "cut" else content)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--lag", type=float, default=3.0, help="seconds")
    parser.add_argument("--torn", action="store_true", help="show directories in part on their way")
    args = parser.parse_args()
    source, target = args.source.resolve(), args.target.resolve()
    if (
        not source.is_dir()
        or source == target
        or source in target.parents
        or target in source.parents
    ):
        parser.error(
            f"expected a directory and a target outside of it, found {source} and {target}"
        )
    target.mkdir(parents=True, exist_ok=True)
    # Blocked and asked for, not handled: a handler that sets a threading.Event waits for ever when
    # the signal comes while this thread is inside the event's own wait().
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    mirror = Mirror(source, target, args.lag, args.torn)
    sys.stdout.write(
        f"[mirror] {source} is in {target} after {args.lag:g} s{', torn' if args.torn else ''}\n"
    )
    sys.stdout.flush()
    while signal.sigtimedwait(ends, POLL_S) is None:
        mirror.poll()


if __name__ == "__main__":
    main()
