"""What bench/sync.py measures proxy.py against: the write-up's way, in which all wait for the
slowest mount.

Pause and resume reach every replica, so generation stops for the whole sync. A load is answered
when all replicas have the adapter; one that answers `No adapter found` is asked again every 0.5 s.
Completions are routed by proxy.py's Router, so that only the sync differs. No replica may fail:
this is a reference, not for use.
"""

import concurrent.futures
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

import urllib3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy import Router

RETRY_S, LOAD_DEADLINE_S = 0.5, 300
URLS = [url.rstrip("/") for url in os.environ["REPLICA_URLS"].split(",")]
HEADERS = {"Authorization": f"Bearer {os.environ['HF_TOKEN']}", "Content-Type": "application/json"}
POOL = urllib3.PoolManager(maxsize=512, timeout=600, retries=3)
ROUTER, LOCK, IN_FLIGHT = Router(), threading.Lock(), dict.fromkeys(range(len(URLS)), 0)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def ask(self, replica, body):
        answer = POOL.request(self.command, URLS[replica] + self.path, body=body, headers=HEADERS)
        return answer.status, answer.data

    def load(self, replica, body):
        until = time.monotonic() + LOAD_DEADLINE_S
        while True:
            status, answer = self.ask(replica, body)
            late = b"No adapter found" in answer or b"add_lora method failed" in answer
            if not late or time.monotonic() > until:
                return status, answer
            time.sleep(RETRY_S)

    def complete(self, body):
        order = json.loads(body)
        blocks = Router.blocks(order["model"], order["prompt"])
        with LOCK:
            replica, _ = ROUTER.route(blocks, IN_FLIGHT)
            IN_FLIGHT[replica] += 1
        try:
            return self.ask(replica, body)
        finally:
            with LOCK:
                IN_FLIGHT[replica] -= 1

    def broadcast(self, call, body):
        with concurrent.futures.ThreadPoolExecutor(len(URLS)) as pool:
            answers = pool.map(lambda replica: call(replica, body), range(len(URLS)))
            return max(answers)  # the worst status

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/stats":  # what train.py's scoreboard reads
            status, answer = 200, json.dumps({"replicas": URLS, "adapters": {}}).encode()
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = self.complete(body)
        elif self.path == "/v1/load_lora_adapter":
            status, answer = self.broadcast(self.load, body)
        elif self.command == "POST" or self.path == "/health":
            status, answer = self.broadcast(self.ask, body)
        else:
            status, answer = self.ask(0, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = handle_any

    def log_message(self, *_):
        return


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024


if __name__ == "__main__":
    Server(("127.0.0.1", int(os.environ["PROXY_PORT"])), Handler).serve_forever()
