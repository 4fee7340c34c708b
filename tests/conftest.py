import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).parents[1]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
# A shell that starts this in the background makes it, and all that it starts, ignore Ctrl-C; nohup
# makes them ignore a closed terminal. bash cannot trap what it was started to ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The longest files begin first, so that none is left alone at the end.
LONGEST = ("recipe", "launch", "slurm", "chaos", "own_replicas", "s3_recipe", "bucket")


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
