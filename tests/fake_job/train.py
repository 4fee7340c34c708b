"""A trainer that asks the proxy for one completion and then does as it is told, by the file `order`
in its output directory: the order is an exit code, and carrying it out removes it.

`train.py check` refuses the data set `missing`."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path


def ask(route: str, body: dict | None = None) -> dict:
    proxy = f"http://127.0.0.1:{os.environ['PROXY_PORT']}"
    request = urllib.request.Request(proxy + route, body and json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if sys.argv[1:] == ["check"]:
    if os.environ["DATASET"] == "missing":
        sys.exit("[train] there is no data set missing")
    say(f"[train] checked, {os.environ.get('HF_TOKEN') and 'with'} the token")
    sys.exit()
names = "MODEL DATASET EVAL_DATASET MAX_STEPS MAX_STALENESS LORA_RANK CONTEXT RUN MOUNT".split()
names += ["TRACKIO_SPACE_ID", "no_proxy"]
say(f"trainer's environment: {json.dumps({name: os.environ.get(name) for name in names})}")
ask("/v1/completions", {"model": os.environ["MODEL"], "prompt": [1, 2, 3], "max_tokens": 4})
say(f"training on {' '.join(sorted(replica['url'] for replica in ask('/stats')['replicas']))}")
order = Path(os.environ["MOUNT"], os.environ["RUN"], "order")
until = time.monotonic() + 120
while time.monotonic() < until:
    try:
        code = int(order.read_text())
    except (FileNotFoundError, ValueError):  # not there, or just being written
        time.sleep(0.05)
    else:
        order.unlink()
        sys.exit(code)
sys.exit("no order came")
