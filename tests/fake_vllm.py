"""A vLLM 0.27.1 server without a model, for tests: in this process, with all answers and failures.

    with FakeVLLM() as fake, running_proxy([fake]) as url: ...

Its answers are vLLM's (texts, statuses and shapes). A completion's text names the weights it was
made with: the content that was at the adapter's path when it was loaded, and, joined by `+`, the
content behind every prefix block that it found in its cache. The cache is keyed by the adapter's
name, as vLLM's is, so mixed weights show in the text.
"""

import contextlib
import http.server
import itertools
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

import requests

ROOT = str(Path(__file__).resolve().parent.parent)

BASE = "Qwen/Qwen2.5-Math-1.5B"
ANSWERS = itertools.count(1)
GENERATE = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
PROOF = {"prompt": [0], "max_tokens": 1}


class FakeVLLM:
    """One replica. The attributes below may be changed at any time, from any thread."""

    def __init__(self, token="", bucket=None, tls=None):
        self.token = token  # the bearer token asked for, "" for none
        # {path: content}; a content names a set of weights
        self.bucket = {} if bucket is None else bucket
        # {path: what this mount shows of it}: "nothing", "partly", "whole" (the default)
        self.sight = {}
        self.config = {"model": BASE, "dtype": "torch.bfloat16", "max_model_len": 4096}
        self.config |= {"max_loras": 6, "max_lora_rank": 1}
        self.rank = {}  # {path: rank of the adapter there}, 1 by default
        self.delay = 0.0  # s a completion takes
        # of completions: "", "500", "503", "401", "engine dead", "reset", "reset in body", "hang",
        # "redirect"
        self.mode = ""
        self.poison = {}  # {a prompt's first token: the mode for it alone, without delay}
        self.sick = {}  # {path: (status, text)}: what other endpoints answer instead
        self.gate = {}  # {path: the event that its answers wait for}
        self.idle_s = 5.0  # s until an idle connection is closed; vLLM's is 5
        self.chunked = False  # how answers are framed
        self.interim = False  # send 103 Early Hints before an answer
        self.tokens = 4  # tokens of an answer, unless `max_tokens` asks for fewer
        self.paused = False
        # {name: (path, content)}, {(name, blocks so far): content}
        self.adapters = {}
        self.cache = {}
        self.keys = set()  # the Authorization headers that came
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
        """Listen, on the same port as before; `fresh` as a process that has just started."""
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

    def completions(self):
        """The prompts that were sent, without the proxy's own proofs of life (a token for [0])."""
        bodies = [body for path, body in list(self.log) if path.partition("?")[0] in GENERATE]
        return [body for body in bodies if isinstance(body, dict) and body.get("prompt") != [0]]

    def proofs(self):
        return [body for body in self.calls("/v1/completions") if body == PROOF]

    def calls(self, path):
        return [body for called, body in list(self.log) if called.partition("?")[0] == path]

    def load(self, name, path):
        """What vLLM 0.27.1 answers to a load: (status, text or JSON)."""
        sight = self.sight.get(path, "whole") if path in self.bucket else "nothing"
        if name in self.adapters:
            text = f"The lora adapter '{name}' has already been loaded. If you want to load the "
            text += "adapter in place, set 'load_inplace' to True."
            return error(400, text, "InvalidUserInput")
        if sight == "nothing":
            return error(
                404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError"
            )
        if sight == "partly":
            reason = "Error while deserializing header: incomplete metadata, file not fully covered"
            return error(500, f"Call to add_lora method failed: {reason}", "InternalServerError")
        if self.rank.get(path, 1) > self.config["max_lora_rank"]:
            limit = f"LoRA rank {self.rank[path]} is greater than max_lora_rank"
            text = f"Call to add_lora method failed: {limit} {self.config['max_lora_rank']}."
            return error(500, text, "InternalServerError")
        self.adapters[name] = (path, self.bucket[path])
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def complete(self, body):
        asked = body if isinstance(body, dict) else {}
        prompt = asked.get("prompt") or asked.get("messages") or asked.get("token_ids")
        if not isinstance(prompt, (str, list)) or not prompt or prompt == [-1]:
            return error(400, "This is the client's own mistake", "BadRequestError")
        model = body.get("model") or self.config["model"]
        if model != self.config["model"] and model not in self.adapters:
            return error(404, f"The model `{model}` does not exist.", "NotFoundError")
        own = self.adapters[model][1] if model in self.adapters else "base"
        weights, hit = {own}, 0
        tokens = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else []
        with self.lock:
            first = next(ANSWERS) * 1000  # no two answers are alike
            answer = list(
                range(first, first + min(self.tokens, body.get("max_tokens", self.tokens)))
            )
            for end in range(16, len(tokens) + len(answer) + 1, 16):
                key = (model, tuple((tokens + answer)[:end]))
                if end < len(tokens) and key in self.cache:
                    hit, weights = end, weights | {self.cache[key]}
                self.cache.setdefault(key, own)
        text = "+".join(sorted(weights))
        logprobs = {
            "text_offset": [0],
            "token_logprobs": [-0.5] * len(answer),
            "tokens": ["a"] * len(answer),
        }
        choice = {
            "index": 0,
            "text": text,
            "logprobs": {**logprobs, "top_logprobs": []},
            "finish_reason": "stop",
        }
        choice |= {"stop_reason": None, "token_ids": answer, "prompt_token_ids": tokens}
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": hit}}
        return 200, {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": model,
            "choices": [choice],
            "usage": usage,
        }

    def models(self):
        cards = [
            {
                "id": self.config["model"],
                "root": self.config["model"],
                "parent": None,
                "max_model_len": 4096,
            }
        ]
        adapters = list(self.adapters.items())
        return {
            "data": cards + [{"id": n, "root": path, "parent": BASE} for n, (path, _) in adapters]
        }

    def server_info(self):
        lora = {key: self.config[key] for key in ("max_loras", "max_lora_rank")}
        model = {key: self.config[key] for key in ("model", "dtype", "max_model_len")}
        return {
            "vllm_config": {
                "model_config": model,
                "lora_config": lora,
                "parallel_config": {"data_parallel_size": 1},
            }
        }


def error(status, message, kind):
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def reset(connection):
    """Close a socket with a reset, as the kernel does for a process that was killed."""
    with contextlib.suppress(OSError):
        # a thread that waits for the peer keeps the socket open until it wakes
        connection.shutdown(socket.SHUT_RD)
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
        if not isinstance(
            sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1], OSError
        ):
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
        except (ValueError, RecursionError):
            body = raw
        fake.keys.add(self.headers.get("Authorization"))
        fake.log.append((self.path, body))
        if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
            return self.reply(401, {"error": "Unauthorized"})
        if path in fake.gate:
            fake.gate[path].wait(10)
        if path in fake.sick:
            return self.reply(*fake.sick[path])
        answers = {
            "/health": (200, ""),
            "/v1/models": (200, fake.models()),
            "/server_info": (200, fake.server_info()),
            "/is_paused": (200, {"is_paused": fake.paused}),
            "/get_world_size": (200, {"world_size": 1}),
            "/sleep": (200, {"status": "asleep"}),
            "/echo": (200, {"path": self.path, "headers": dict(self.headers)}),
        }
        if path in answers:
            return self.reply(*answers[path])
        if path in GENERATE:
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
            return self.reply(
                200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
            )
        return self.reply(404, {"detail": "Not Found"})

    def completion(self, body):
        """Count as active until the answer is known: its reader may look at the count at once."""
        fake = self.fake
        fake.active += 1
        try:
            status, answer = fake.complete(body)
            if status != 400:
                tokens = body.get("prompt") or body.get("token_ids") or [None]
                self.linger(0 if body == PROOF or tokens[0] in fake.poison else math.inf)
        finally:
            fake.active -= 1
        if status == 400:
            return self.reply(status, answer)
        mode = fake.poison.get(tokens[0], fake.mode)
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

    def linger(self, limit):
        """Take `fake.delay`, at most `limit`, for ever in mode "hang". Stop if the peer leaves:
        vLLM aborts the request then."""
        begin = time.monotonic()
        while self.fake.mode == "hang" or time.monotonic() < begin + min(limit, self.fake.delay):
            if self.connection.fileno() < 0 or select.select([self.connection], [], [], 0.01)[0]:
                self.fake.aborted += 1
                raise ConnectionAbortedError("the client left")

    def drop(self):
        self.close_connection = True
        reset(self.connection)

    def stream(self, answer):
        events = [json.dumps(answer)] * 3 + ["[DONE]"]
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        self.reply(200, "".join(f"data: {event}\n\n" for event in events), kind)

    def reply(self, status, answer, headers=None, cut=False):
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        text = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":"))
        data = text.encode()
        if self.fake.interim:
            self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n")
        self.send_response(status)
        for name, value in ({"Content-Type": kind} | (headers or {})).items():
            self.send_header(name, value)
        if self.fake.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            parts = [data[i : i + 50] for i in range(0, len(data), 50)]
            data = b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts)
            data += b"0\r\nTrailer: 1\r\n\r\n"
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        if cut:
            self.drop()


def wait_until(true, seconds=30):
    """Wait for a condition; AssertionError, with its source line, if it never comes true."""
    until = time.monotonic() + seconds
    while not (value := true()):
        where = f"{true.__code__.co_filename}:{true.__code__.co_firstlineno}"
        assert time.monotonic() < until, f"not true within {seconds} s: {where}"
        time.sleep(0.005)
    return value


class Proxy(str):
    """proxy.py as a process, in front of fakes: its URL. `said` is what it has printed."""

    def __new__(cls, fakes, token, api_key, constants):
        program = "import json, sys, proxy; vars(proxy).update(json.loads(sys.argv[1])); "
        program += "proxy.main()"
        command = [sys.executable, "-c", program, json.dumps(constants)]
        urls = ",".join(getattr(fake, "url", fake) for fake in fakes)
        environment = {**os.environ, "REPLICA_URLS": urls, "HF_TOKEN": token, "PROXY_PORT": "0"}
        environment |= {"VLLM_API_KEY": api_key, "PYTHONPATH": ROOT}
        log = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        shown = lambda: os.pread(log.fileno(), 1 << 22, 0).decode()
        wait_until(lambda: "in front of" in shown() or process.poll() is not None)
        line = next(line for line in shown().splitlines() if "in front of" in line)
        url = super().__new__(cls, line.split()[1])
        url.process, url.read = process, shown
        return url

    @property
    def said(self):
        return self.read()


@contextlib.contextmanager
def running_proxy(fakes, token="", ready=True, api_key="", **constants):
    """proxy.py in front of fakes, with some of its constants changed. It must neither end nor show
    its token or a traceback, whatever the test does to it."""
    url = Proxy(fakes, token, api_key, constants)
    try:
        if ready:
            wait_until(lambda: requests.get(f"{url}/health", timeout=30).status_code == 200)
        yield url
        assert url.process.poll() is None, url.said
    finally:
        url.process.kill()
        url.process.wait()
        assert "Traceback" not in url.said and not (token and token in url.said), url.said
