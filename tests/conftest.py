import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).parents[1]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
# A shell that starts this in the background makes it, and all that it starts, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
