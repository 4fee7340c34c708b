"""A vLLM 0.27.1 server without a model, for tests: in this process, with every answer and every failure at hand.

    with FakeVLLM() as fake, running_proxy([fake.url]) as url: ...

Its answers are vLLM's (texts, statuses and shapes). A completion's text names the weights it was made with: the content
that was at the adapter's path when it was loaded, and, joined by `+`, the content behind every prefix block that it
found in its cache. The cache is keyed by the adapter's name, as vLLM's is, so mixed weights show in the text.
"""

import contextlib
import gzip
import http.server
import itertools
import json
import math
import os
import select
import socket
import struct
import sys
import threading
import time
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import proxy

BASE = "Qwen/Qwen2.5-Math-1.5B"
ANSWERS = itertools.count(1)


class FakeVLLM:
    """One replica. The attributes below may be changed at any time, from any thread."""

    def __init__(self, token="", bucket=None, tls=None):
        self.token = token  # the bearer token asked for, "" for none
        self.bucket = {} if bucket is None else bucket  # {path: content}; a content names a set of weights
        self.sight = {}  # {path: what this mount shows of it}: "nothing", "partly", "whole" (the default)
        self.config = {
            "model": BASE,
            "dtype": "torch.bfloat16",
            "max_model_len": 4096,
            "max_loras": 6,
            "max_lora_rank": 1,
        }
        self.rank = {}  # {path: rank of the adapter there}, 1 by default
        self.delay = 0.0  # s a completion takes
        self.mode = (
            ""  # completions: "", "500", "503", "engine dead", "reset", "reset in body", "hang", "redirect", "401"
        )
        self.poison = None  # a first token that makes a completion answer 500
        self.sick = {}  # {path: (status, text)}: what other endpoints answer instead
        self.idle_s = 5.0  # s until an idle connection is closed; vLLM's is 5
        self.body = "length"  # how answers are framed: "length", "chunked", "close"
        self.gzip = False  # pack answers, whatever the request accepts
        self.tokens = 4  # tokens of an answer, unless `max_tokens` asks for fewer
        self.paused = False
        self.adapters, self.cache = {}, {}  # {name: (path, content)}, {(name, blocks so far): content}
        self.log, self.resets, self.aborted, self.active, self.connections = [], 0, 0, 0, set()
        self.tls, self.port, self.server, self.lock = tls, 0, None, threading.Lock()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.mode, self.delay = "", 0.0
        if self.server:
            self.stop()

    @property
    def url(self):
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def start(self, fresh=True):
        """Listen, on the same port as before if there was one; `fresh` as a process that has just started."""
        if fresh:
            self.adapters, self.cache, self.paused = {}, {}, False
        self.server = Server(("127.0.0.1", self.port), Handler)
        self.server.fake, self.port = self, self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        """Die: nobody listens any more and every open connection is reset."""
        self.server.shutdown()
        self.server.server_close()
        self.server = None
        for connection in list(self.connections):
            reset(connection)

    def completions(self, **fields):
        """The completions asked for, without the proxy's own proofs of life (one token for `[0]`)."""
        bodies = [body for path, body in self.log if path.startswith(("/v1/completions", "/v1/chat"))]
        bodies = [body for body in bodies if isinstance(body, dict) and body.get("prompt") != [0]]
        return [body for body in bodies if all(body.get(name) == value for name, value in fields.items())]

    def calls(self, path):
        return [body for called, body in list(self.log) if called.partition("?")[0] == path]

    def load(self, name, path):
        """What vLLM 0.27.1 answers to a load: (status, text or JSON)."""
        sight = self.sight.get(path, "whole") if path in self.bucket else "nothing"
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                              "place, set 'load_inplace' to True.", "InvalidUserInput")  # fmt: skip
        if sight == "nothing":
            return error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        if sight == "partly":
            reason = "Error while deserializing header: incomplete metadata, file not fully covered"
            return error(500, f"Call to add_lora method failed: {reason}", "InternalServerError")
        if self.rank.get(path, 1) > self.config["max_lora_rank"]:
            limit = f"LoRA rank {self.rank[path]} is greater than max_lora_rank {self.config['max_lora_rank']}."
            return error(500, f"Call to add_lora method failed: {limit}", "InternalServerError")
        self.adapters[name] = (path, self.bucket[path])
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def complete(self, body):
        model = body.get("model") or self.config["model"]
        if model != self.config["model"] and model not in self.adapters:
            return error(404, f"The model `{model}` does not exist.", "NotFoundError")
        prompt = body.get("prompt") or body.get("messages")
        if not prompt or prompt == [-1]:
            return error(400, "This is the client's own mistake", "BadRequestError")
        own = self.adapters[model][1] if model in self.adapters else "base"
        weights, hit = {own}, 0
        tokens = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else []
        with self.lock:
            first = next(ANSWERS) * 1000  # no two answers are alike
            answer = list(range(first, first + min(self.tokens, body.get("max_tokens", self.tokens))))
            for end in range(16, len(tokens) + len(answer) + 1, 16):
                key = (model, tuple((tokens + answer)[:end]))
                if end < len(tokens) and key in self.cache:
                    hit, weights = end, weights | {self.cache[key]}
                self.cache.setdefault(key, own)
        text = "+".join(sorted(weights))
        logprobs = {"text_offset": [0], "token_logprobs": [-0.5] * len(answer), "tokens": ["a"] * len(answer)}
        choice = {"index": 0, "text": text, "logprobs": {**logprobs, "top_logprobs": []}, "finish_reason": "stop"}
        choice |= {"stop_reason": None, "token_ids": answer, "prompt_token_ids": tokens}
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": hit}}
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice], "usage": usage}

    def models(self):
        cards = [{"id": self.config["model"], "root": self.config["model"], "parent": None, "max_model_len": 4096}]
        adapters = list(self.adapters.items())
        return {"data": cards + [{"id": n, "root": path, "parent": BASE} for n, (path, _) in adapters]}

    def server_info(self):
        lora = {key: self.config[key] for key in ("max_loras", "max_lora_rank")}
        model = {key: self.config[key] for key in ("model", "dtype", "max_model_len")}
        return {
            "vllm_config": {"model_config": model, "lora_config": lora, "parallel_config": {"data_parallel_size": 1}}
        }


def error(status, message, kind):
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def reset(connection):
    """Close a socket with a reset, as the kernel does for a process that was killed."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(connection.detach())  # close() would wait for the files made of it


class Server(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size, allow_reuse_address = True, 1024, True

    def finish_request(self, request, client_address):
        if self.fake.tls:
            request = self.fake.tls.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request, client_address):
        """A peer that goes away in the middle is what these tests are about."""
        if not isinstance(sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def handle(self):
        self.fake = self.server.fake
        self.fake.connections.add(self.connection)
        try:
            self.connection.settimeout(self.fake.idle_s)
            super().handle()
        finally:
            self.fake.connections.discard(self.connection)

    def log_message(self, *_):
        return

    def do_GET(self):
        self.serve()

    def do_POST(self):
        self.serve()

    def serve(self):
        fake, path = self.fake, urllib.parse.urlsplit(self.path).path
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = raw
        fake.log.append((self.path, body))
        if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
            return self.reply(401, {"error": "Unauthorized"})
        if path in fake.sick:
            return self.reply(*fake.sick[path])
        answers = {
            "/health": (200, ""),
            "/v1/models": (200, fake.models()),
            "/server_info": (200, fake.server_info()),
            "/is_paused": (200, {"is_paused": fake.paused}),
            "/get_world_size": (200, {"world_size": 1}),
            "/echo": (200, {"path": self.path, "headers": dict(self.headers)}),
        }
        if path in answers:
            return self.reply(*answers[path])
        if path in ("/v1/completions", "/v1/chat/completions"):
            return self.completion(body)
        if path in ("/pause", "/resume"):
            fake.paused = path == "/pause"
            return self.reply(200, {"status": "paused" if fake.paused else "resumed"})
        if path == "/reset_prefix_cache":
            with fake.lock:
                fake.resets, fake.cache = fake.resets + 1, {}
            return self.reply(200, {"success": True})
        if path == "/v1/load_lora_adapter":
            return self.reply(*fake.load(body["lora_name"], body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            if fake.adapters.pop(body["lora_name"], None) is None:
                text = f"The lora adapter '{body['lora_name']}' cannot be found."
                return self.reply(*error(404, text, "NotFoundError"))
            return self.reply(200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")
        return self.reply(404, {"detail": "Not Found"})

    def completion(self, body):
        fake = self.fake
        fake.active += 1
        try:
            status, answer = fake.complete(body)
            self.linger(0 if body.get("prompt") == [0] else math.inf)
            mode = "500" if fake.poison and body.get("prompt", [None])[0] == fake.poison else fake.mode
            if mode == "reset":
                return self.drop()
            if mode == "redirect":
                return self.reply(302, "", {"Location": fake.elsewhere})
            if mode == "engine dead":
                text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
                return self.reply(*error(500, text, "InternalServerError"))
            if mode in ("500", "503", "401"):
                status, answer = error(int(mode), f"the fake fails with {mode}", "InternalServerError")
            if body.get("stream") and status == 200:
                return self.stream(answer)
            return self.reply(status, answer, cut=mode == "reset in body")
        finally:
            fake.active -= 1

    def linger(self, limit):
        """Take `fake.delay`, at most `limit`, for ever in mode "hang"; stop if the peer leaves: vLLM aborts it then."""
        begin = time.monotonic()
        while self.fake.mode == "hang" or time.monotonic() < begin + min(limit, self.fake.delay):
            if self.connection.fileno() < 0 or select.select([self.connection], [], [], 0.01)[0]:
                self.fake.aborted += 1
                raise ConnectionAbortedError("the client left")

    def drop(self):
        self.close_connection = True
        reset(self.connection)

    def stream(self, answer):
        """Four events; a semaphore `fake.events`, when there is one, lets them out one by one."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [json.dumps(answer)] * 3 + ["[DONE]"]:
            if not getattr(self.fake, "events", threading.Semaphore(1)).acquire(timeout=5):
                return self.drop()
            if self.fake.mode == "reset in body":
                return self.drop()
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, status, answer, headers=(), cut=False):
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if self.fake.gzip:
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        if self.fake.body == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            parts = [data[i : i + 50] for i in range(0, len(data), 50)]
            data = b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: 1\r\n\r\n"
        elif self.fake.body == "length":
            self.send_header("Content-Length", str(len(data)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        if cut:
            self.drop()


def wait_until(true, seconds=10):
    """Wait for a condition; AssertionError, with the condition's source line, if it never comes true."""
    until = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < until, (
            f"not true within {seconds} s: {true.__code__.co_filename}:{true.__code__.co_firstlineno}"
        )
        time.sleep(0.005)
    return value


@contextlib.contextmanager
def running_proxy(fakes, token="", ready=True, **constants):
    """proxy.py in this process, in front of fakes, with some of its constants changed. Yields its URL; the fleet is
    `running_proxy.fleet`'s: `url.fleet`."""
    before = {name: getattr(proxy, name) for name in constants}
    for name, value in constants.items():
        setattr(proxy, name, value)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    fleet = proxy.Fleet([getattr(fake, "url", fake) for fake in fakes], token)
    for _ in range(proxy.ACCEPTORS):
        threading.Thread(target=proxy.serve, args=(listener, fleet), daemon=True).start()
    url = Url(f"http://127.0.0.1:{listener.getsockname()[1]}")
    url.fleet = fleet
    try:
        if ready:
            wait_until(lambda: fleet.health()[0] == 200)
        yield url
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # close() alone would leave them in accept()
        listener.close()
        fleet.set_replicas([])
        for name, value in before.items():
            setattr(proxy, name, value)


class Url(str):
    fleet = None
