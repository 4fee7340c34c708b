"""A trainer that asks the proxy for one completion and then does as it is told, by the file `order` in its output
directory: the order is an exit code, and carrying it out removes it."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

output = Path(os.environ["MOUNT"], os.environ["RUN"])
proxy = f"http://127.0.0.1:{os.environ['PROXY_PORT']}"


def ask(route: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(proxy + route, body and json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


shown = ("MODEL", "DATASET", "EVAL_DATASET", "MAX_STEPS", "MAX_STALENESS", "LORA_RANK", "CONTEXT", "RUN", "MOUNT")
say(f"trainer's environment: {json.dumps({name: os.environ.get(name) for name in shown})}")
ask("/v1/completions", {"model": os.environ["MODEL"], "prompt": [1, 2, 3], "max_tokens": 4})
say(f"training on {' '.join(sorted(replica['url'] for replica in ask('/stats')['replicas']))}")
until = time.monotonic() + 120
while time.monotonic() < until:
    try:
        order = int((output / "order").read_text())
    except (FileNotFoundError, ValueError):  # not there, or just being written
        time.sleep(0.05)
    else:
        (output / "order").unlink()
        sys.exit(order)
sys.exit("no order came")
