"""Makes N vLLM servers look like one to TRL: prefix routing, bearer token, adapters for all.

    REPLICA_URLS=https://a--8000.hf.jobs,https://b--8000.hf.jobs HF_TOKEN=hf_... python proxy.py

It runs in the trainer Job on 127.0.0.1:8000, where TRL's `vllm_server_base_url` points. It needs no
GPU and a tenth of a core at the recipe's 21 requests per second. You should see
`[proxy] https://... in service with 0 adapters` for each replica, a line for each adapter, and one
for each replica that is doubted, leaves or returns; `GET /stats` shows the rest as JSON.

What it does with a request:
    generation         goes to the replica that has most of the prompt in its KV cache (Router). It
                       waits while no replica holds the policy that it names. When a replica fails,
                       it goes to another one, and that replica must prove that it still
                       generates before it gets a new request
    adapter load       is answered at once, and each replica loads when its mount shows the files:
                       a weight sync costs nothing. Only a run's first load is answered when done
    adapter unload     is answered at once; vLLM lets running requests finish
    /pause, /resume    are answered here: vLLM loads adapters while it generates, and a pause would
                       wipe its prefix cache
    FAN_OUT            goes to all replicas in service: it changes what a server holds or does
    the rest           goes to one of them

Environment: REPLICA_URLS (comma-separated); HF_TOKEN, sent to https://*.hf.jobs and to this machine
alone; VLLM_API_KEY, sent to all other replicas; PROXY_HOST (127.0.0.1); PROXY_PORT (8000);
SSL_CERT_FILE (certificates to trust instead of the usual ones).

To change it: the first block of constants is yours, and the second follows vLLM and TRL. Router
alone knows how requests are routed. Fleet decides which replicas are in service and what they hold,
with one thread per replica. Handler takes TRL's requests, with one thread per connection. `refusal`
and `Handler.forward` say what a replica's answer means.
"""

import collections
import contextlib
import itertools
import json
import os
import select
import socket
import socketserver
import ssl
import sys
import threading
import time
import urllib.parse

import httptools

# Yours to change:
# Requests by which an owner of the prefix may be ahead of the least loaded replica.
MAX_LEAD = 8
# Blocks that the router remembers, in 95 MB; the least recently used block goes first.
TABLE_BLOCKS = 500_000
# Seconds until an adapter that a mount does not show has failed there.
LOAD_DEADLINE_S = 300
# Seconds without an answer until a replica must prove that it still generates.
HANG_S = 120
# Seconds for a control call, such as that proof (one token) or a load (under a second).
CONTROL_S = 30
PROBE_S = 2  # seconds between two health checks of a replica
# Failures of one request at any replicas; then the request is to blame.
MAX_FAILURES = 5

# vLLM's and TRL's:
# Tokens: vLLM's KV block; its prefix cache finds whole blocks only.
BLOCK = 16
# Seconds for a request, waiting included: below TRL's `request_timeout` of 600.
HOLD_DEADLINE_S = 540
# Seconds between two loads of an adapter that a mount does not show yet.
RETRY_S = 0.5
# Seconds until an idle connection is not used again: vLLM closes it after 5.
IDLE_S = 4
GENERATE = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
# Paths that change what a server holds or does begin with:
FAN_OUT = ("/reset_", "/sleep", "/wake_up", "/collective_rpc", "/abort_", "/start_", "/stop_")
FAN_OUT += ("/init_weight", "/update_weight", "/finish_weight")
HELD = ("loading", "live")  # states of a policy that every replica should hold
# What all replicas must share, by its place in /server_info:
FLAGS = {"model_config": "model dtype max_model_len", "lora_config": "max_loras max_lora_rank"}

JSON = "application/json"
DEVELOPMENT = ": start it with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# Successor of a block that prompts continue differently; hash() is never -1.
MANY = -1
COUNTS = "routed affinity spilled unmatched retried ejected readmitted held aborted".split()


def say(text):
    """A line in one write: processes share this output, and print() may write its end apart."""
    sys.stdout.write(f"[proxy] {text}\n")
    sys.stdout.flush()


class Router:
    """Which replica has most of a prompt in its KV cache. Pure: no I/O, no clock, no lock.

    A replica is known by a number, its owner number. The table maps the hash of a block to (owners
    as a bit mask, the one block seen after it or MANY). A replica that leaves loses its blocks,
    because it comes back under another number: nobody asks for the old one again.
    """

    def __init__(self, capacity=TABLE_BLOCKS):
        self.table, self.capacity, self.turn = collections.OrderedDict(), capacity, 0

    @staticmethod
    def blocks(policy, tokens):
        """Hashes of the whole blocks of `tokens` (ids), each chained to the one before it and the
        first to the policy's name, like the keys of vLLM's prefix cache."""
        parts = [str(tokens[i : i + BLOCK]) for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        chain = itertools.accumulate(parts, lambda *link: hash(link), initial=hash(policy))
        return list(chain)[1:]

    def route(self, blocks, load):
        """Choose an owner from `load` ({owner: requests in flight}) for a prompt, and remember that
        it has the prompt's blocks. Returns (owner, how).

        A block that different prompts continue differently is shared text, such as a chat template:
        it and all blocks before it do not count. Of the owners of other blocks,
          affinity   the one with the longest match gets the request, unless it is more than
                     MAX_LEAD ahead of the least loaded; of equal ones, the less loaded;
          spilled    all are further ahead: the least loaded replica becomes an owner, too;
          unmatched  there are none: the least loaded replica becomes the first.
        """
        depth, shared, alive = dict.fromkeys(load, 0), 0, list(load)
        for k, block in enumerate(blocks, 1):
            owners, successor = self.table.get(block, (0, None))
            alive = [owner for owner in alive if owners >> owner & 1]
            if not alive:
                break
            depth.update(dict.fromkeys(alive, k))
            if successor == MANY or successor and k < len(blocks) and successor != blocks[k]:
                shared = k
        least = min(load.values())
        matched = [owner for owner in load if depth[owner] > shared]
        near = [owner for owner in matched if load[owner] <= least + MAX_LEAD]
        if near:
            how, chosen = "affinity", max(near, key=lambda owner: (depth[owner], -load[owner]))
        else:
            idle = [owner for owner in load if load[owner] == least]
            self.turn += 1
            how, chosen = "spilled" if matched else "unmatched", idle[self.turn % len(idle)]
        # A prompt that matched nothing shows which text is shared. One that matched another prompt
        # and goes on is its next turn: eight answers do not make their prompt a template.
        after = None
        # The last block of a prompt is the first to be forgotten.
        for block in reversed(blocks):
            owners, successor = self.table.get(block, (0, None))
            if after and successor != after and not (matched and owners):
                successor = MANY if successor else after
            self.table[block] = (owners | 1 << chosen, successor)
            self.table.move_to_end(block)
            after = block
        while len(self.table) > self.capacity:
            self.table.popitem(last=False)
        return chosen, how


class Wire:
    """One HTTP/1.1 connection, from either side. httptools, the parser in vLLM's own server, reads
    what arrives and calls `on_...`; whatever is sent has a Content-Length."""

    def __init__(self, sock, parser):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.parser, self.messages = sock, parser(self), collections.deque()
        self.used, self.keep, self.url = 0.0, True, b""

    def send(self, line, fields, body):
        lines = [line, *map(": ".join, fields.items()), f"Content-Length: {len(body)}", "", ""]
        self.sock.sendall("\r\n".join(lines).encode("latin-1") + body)

    def receive(self):
        """The next message: (method or status, target, fields, body). BROKEN if none comes."""
        while not self.messages:
            if not (data := self.sock.recv(1 << 16)):
                raise EOFError("the connection was closed")
            self.parser.feed_data(data)
        return self.messages.popleft()

    def on_message_begin(self):
        self.fields, self.parts = {}, []

    def on_url(self, part):
        self.url += part

    def on_header(self, name, value):
        self.fields[name.decode("latin-1").title()] = value.decode("latin-1")

    def on_body(self, part):
        self.parts.append(part)

    def on_message_complete(self):
        target, self.url, body = self.url.decode("latin-1"), b"", b"".join(self.parts)
        what = self.parser.get_method().decode() if target else self.parser.get_status_code()
        self.keep = self.parser.should_keep_alive()
        # An interim answer, such as 103, is not the answer.
        if target or what >= 200:
            self.messages.append((what, target, self.fields, body))


# How a connection can fail:
BROKEN = (OSError, EOFError, httptools.HttpParserError, httptools.HttpParserUpgrade)


def closed(sock):
    """Whether the other side has closed a connection. ValueError if this side has."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


class Failed(Exception):
    """What the proxy cannot do: what is wrong and what to do. It answers a client with `status`."""

    def __init__(self, message, status=502):
        super().__init__(message)
        self.status = status


class Flight:
    """One request of a client. `replica`: where it is, with its connection `upstream`. `over`: the
    client has left, or the time is up. `held`: it has waited for a replica."""

    def __init__(self, client):
        self.client, self.began, self.over = client, time.monotonic(), False
        self.replica, self.upstream, self.held = None, None, False

    def cut(self):
        """Wake the thread that waits for the replica's answer: its connection ends."""
        # It has ended by itself, or is still to come.
        with contextlib.suppress(OSError, TypeError):
            socket.socket.shutdown(self.upstream, socket.SHUT_RDWR)


class Replica:
    """One vLLM server: its address, its connections, and what the fleet knows of it. Its states:

    out      not in service
    joining  healthy, cleaned, and being given the adapters
    ready    in service
    doubted  a request failed there: it gets no new ones until it has proved itself
    """

    def __init__(self, url, token, key):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a replica's URL must be http(s)://host[:port], found {url!r}")
        self.url, self.prefix = url, parts.path
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.address = parts.hostname, parts.port or (443 if self.tls else 80)
        self.state, self.reason, self.owner = "out", "starting", None
        # {name: path}
        self.served, self.routed, self.adapters = False, 0, {}
        self.joined = self.next_load = self.next_check = self.last_answer = 0.0
        # Connections that are kept alive.
        self.idle = collections.deque()
        a_job, here = parts.hostname.endswith(".hf.jobs"), parts.hostname == "127.0.0.1"
        self.key = token if self.tls and a_job or here and not key else key
        self.fields = {"Host": parts.netloc, "Accept-Encoding": "identity", "Content-Type": JSON}
        self.fields |= {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def connect(self, timeout):
        sock = socket.create_connection(self.address, timeout or 10)
        if self.tls:
            sock = self.tls.wrap_socket(sock, server_hostname=self.address[0])
        sock.settimeout(timeout)
        return Wire(sock, httptools.HttpResponseParser)

    def exchange(self, wire, method, path, body):
        """Its answer to a request: (status, body, content type). BROKEN."""
        wire.send(f"{method} {self.prefix}{path} HTTP/1.1", self.fields, body)
        status, _, fields, body = wire.receive()
        # A gateway may echo the key.
        body = body.replace(self.key.encode(), b"***") if self.key else body
        return status, body, fields.get("Content-Type", JSON)

    def attempt(self, method, path, order=b"", timeout=None):
        """A control call, with `order` as JSON: (status, text), or 504 and why no answer came."""
        body = order if isinstance(order, bytes) else json.dumps(order).encode()
        try:
            wire = self.connect(timeout or CONTROL_S)
            with wire.sock:
                status, body, _ = self.exchange(wire, method, path, body)
        except BROKEN as error:
            return 504, f"{type(error).__name__}: {error}"
        missing = status == 404 and b'"Not Found"' in body
        return status, body.decode(errors="replace") + missing * DEVELOPMENT

    def control(self, method, path, order=b""):
        """A control call that must succeed: the JSON that it answers, or None. Failed."""
        status, text = self.attempt(method, path, order)
        if status != 200:
            raise Failed(f"{path}: {status} {text[:300]}")
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)

    def held(self):
        """{name: path} of the adapters it holds; the base model has no parent. Failed."""
        cards = dig(self.control("GET", "/v1/models"), "data")
        cards = cards if isinstance(cards, list) else []
        return {str(dig(card, "id")): dig(card, "root") for card in cards if dig(card, "parent")}

    def unload(self, name):
        """A failure does no harm: vLLM replaces the adapter that was not used for longest."""
        self.attempt("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def generate(self):
        """One token: /health answers even while the engine hangs. Failed."""
        self.control("POST", "/v1/completions", {"prompt": [0], "max_tokens": 1})

    def connection(self):
        """One that was kept alive, or a new one. BROKEN."""
        # Other threads take from `idle`, too.
        with contextlib.suppress(IndexError):
            while True:
                wire = self.idle.pop()
                if time.monotonic() - wire.used < IDLE_S and not closed(wire.sock):
                    return wire
                wire.sock.close()
        return self.connect(None)

    def answer(self, flight, *request):
        """Its answer to a client's request: (status, body, content type). BROKEN. No timeout is
        set, because Fleet.watch ends what takes too long."""
        wire = self.connection()
        flight.upstream = wire.sock
        # That happened before there was a connection to cut.
        if flight.over or self.state == "out":
            flight.cut()
        try:
            answer = self.exchange(wire, *request)
        except BROKEN:
            wire.sock.close()
            raise
        flight.upstream, self.last_answer = None, time.monotonic()
        if wire.keep:
            wire.used = self.last_answer
            self.idle.append(wire)
        return answer


def dig(data, *keys):
    """What is at `keys` in JSON that came from outside, None if it is not there."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


class Policy:
    """An adapter: a name that means the weights at a path, for ever. Its states: loading, live,
    failed, unloaded."""

    def __init__(self, name, path):
        self.name, self.path, self.state, self.error = name, path, "loading", ""
        self.tries, self.started = 0, time.monotonic()


def refusal(status, text):
    """What a refused load means (the texts are vLLM 0.27.1's).

    later  the mount does not show the files yet, or only some of them, because an object store
           publishes file by file; or a gateway is busy, or gave no answer
    never  vLLM says why no other try can help
    sick   this replica is at fault
    """
    if status == 500 and "add_lora method failed" in text:
        never = "max_lora_rank", "expected target modules", "support"
        return "never" if any(words in text for words in never) else "later"
    if status in (408, 425, 429) or status > 500 or "No adapter found" in text:
        return "later"
    # An adapter that somebody else loaded may have other weights.
    return "never" if status == 400 and "already been loaded" not in text else "sick"


class Fleet:
    """All replicas as one server. One thread per replica (`keep`) brings it to what is wanted:
    admitted, given every adapter, checked. Threads of requests choose a replica (`route`) and
    report that it failed (`doubt`). One lock, `changed`, guards all of it."""

    def __init__(self, urls, token="", key=""):
        self.changed = threading.Condition(threading.Lock())
        self.router, self.owners, self.count = Router(), itertools.count(1), collections.Counter()
        # {name: Policy}, in load order
        self.policies = {}
        # {Handler: Flight}, the newest one of each connection
        self.flights = {}
        # `failure` answers the next load
        self.proven, self.failure, self.flags = False, "", None
        self.replicas = [Replica(url, token, key) for url in dict.fromkeys(urls)]
        for replica in self.replicas:
            threading.Thread(target=self.keep, args=(replica,), daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    # ---- what the threads of requests call

    def route(self, flight, policy, blocks):
        """Choose a replica in service that holds `policy` and reserve a place there; wait while
        there is none. None if the policy was unloaded. Failed: the load failed, or time is up."""
        with self.changed:
            while not (fit := self.fit(policy)):
                if policy and policy.error:
                    raise Failed(policy.error, 424)
                if policy and policy.state == "unloaded":
                    return None
                if flight.over:
                    raise Failed(f"no replica in {HOLD_DEADLINE_S} s: {self.reasons()}", 503)
                self.count["held"] += not flight.held
                flight.held = True
                self.changed.wait(1)
            load = {owner: len(self.at(replica)) for owner, replica in fit.items()}
            owner, how = self.router.route(blocks, load)
            self.count.update(("routed", how))
            replica = fit[owner]
            replica.routed += 1
            flight.replica, flight.upstream = replica, None
        return replica

    def doubt(self, replica, reason):
        """A request failed at a replica. That is no verdict: the replica must prove itself."""
        with self.changed:
            if replica.state == "ready":
                replica.state, replica.reason = "doubted", reason
                say(f"{replica.url} doubted: {reason}")
                self.changed.notify_all()

    def load(self, name, path):
        """Have an adapter loaded by all replicas. Returns when that is accepted, except for a run's
        first load, which proves the set-up: when it is done. A second load waits for the first.
        Failed: with the error of this load, or of the one before it, which had been accepted."""
        patience = LOAD_DEADLINE_S + HOLD_DEADLINE_S
        with self.changed:
            if not self.changed.wait_for(lambda: not self.loading(), patience):
                raise Failed(f"{self.loading().name} is still loading: {self.reasons()}", 503)
            if self.failure:
                error, self.failure = self.failure, ""
                raise Failed(error, 424)
            if used := self.policies.get(name):
                if (used.path, used.state) == (path, "live"):
                    return
                raise Failed(f"{name} is {used.path}, {used.state}: names never repeat", 409)
            policy = self.policies[name] = Policy(name, path)
            self.changed.notify_all()
            if not self.proven:
                self.changed.wait_for(lambda: policy.state != "loading", patience)
                if policy.state != "live":
                    self.failure = ""
                    raise Failed(policy.error or f"{name} {policy.state}: {self.reasons()}", 424)

    def unload(self, name):
        """Unknown names are fine: a trainer also unloads what an earlier one loaded."""
        with self.changed:
            if policy := self.policies.get(name):
                policy.state = "unloaded"
                self.changed.notify_all()

    # ---- what is true of the fleet; the caller holds the lock

    def ready(self):
        return [replica for replica in self.replicas if replica.state == "ready"]

    def fit(self, policy):
        """{owner: replica} that may get a request for `policy`; None is the base model."""
        if policy and policy.state not in HELD:
            return {}
        return {r.owner: r for r in self.ready() if not policy or policy.name in r.adapters}

    def at(self, replica):
        return [f for f in list(self.flights.values()) if f.replica is replica]

    def loading(self):
        return next((p for p in self.policies.values() if p.state == "loading"), None)

    def reasons(self):
        out = [f"{r.url} {r.state}: {r.reason}" for r in self.replicas if r.state != "ready"]
        return "; ".join(out) or "all replicas are in service"

    def settle(self):
        """A load is done when every replica in service has it."""
        policy, ready = self.loading(), self.ready()
        if policy and ready and all(policy.name in replica.adapters for replica in ready):
            policy.state, self.proven = "live", True
            where = f"{policy.name} on {len(ready)}/{len(self.replicas)} replicas"
            say(f"{where} after {time.monotonic() - policy.started:.1f} s, {policy.tries} loads")
        self.changed.notify_all()

    # ---- one thread per replica

    def keep(self, replica):
        while True:
            try:
                self.step(replica)
            # A control call that fails is no verdict on a replica in service.
            except Failed as error:
                call = self.doubt if replica.state == "ready" else self.take_out
                call(replica, str(error))

    def take_out(self, replica, reason):
        """Its requests go elsewhere. It may come back as a stranger, after PROBE_S."""
        with self.changed:
            if (replica.state, replica.reason) != ("out", reason):
                say(f"{replica.url} {'out' if replica.served else 'not ready'}: {reason}")
            self.count["ejected"] += replica.state in ("ready", "doubted")
            replica.state, replica.reason, replica.adapters = "out", reason, {}
            for flight in self.at(replica):
                flight.cut()
            self.settle()
        time.sleep(PROBE_S)

    def step(self, replica):
        """Do the one thing that is due for a replica, or wait until there is one. Failed."""
        if replica.state in ("out", "doubted"):
            return self.admit(replica) if replica.state == "out" else self.prove(replica)
        with self.changed:
            now = time.monotonic()
            wanted = {name: p for name, p in self.policies.items() if p.state in HELD}
            surplus = next((name for name in replica.adapters if name not in wanted), None)
            missing = [policy for name, policy in wanted.items() if name not in replica.adapters]
            if replica.state == "joining" and not any(p.state == "live" for p in missing):
                self.count["readmitted"] += replica.served
                replica.state, replica.reason, replica.served = "ready", "", True
                say(f"{replica.url} in service with {len(replica.adapters)} adapters")
                self.settle()
            due = min(replica.next_check, replica.next_load if missing else replica.next_check)
            if not surplus and now < due:
                self.changed.wait(due - now)
                return None
        if surplus:
            replica.unload(surplus)
            replica.adapters.pop(surplus)
        elif missing and now >= replica.next_load:
            self.load_on(replica, missing[0])
        else:
            self.check(replica)

    def admit(self, replica):
        """Healthy, without adapters or cached blocks of another time, able to generate, with the
        fleet's flags: then it joins. Failed."""
        replica.control("GET", "/health")
        info = replica.control("GET", "/server_info?config_format=json")
        places = [(place, key) for place, keys in FLAGS.items() for key in keys.split()]
        flags = {key: dig(info, "vllm_config", place, key) for place, key in places}
        if not isinstance(info, dict) or "vllm_config" in info and None in flags.values():
            raise Failed(f"its /server_info has {flags}: start it with --enable-lora")
        # An earlier trainer may have died in a sync.
        replica.control("POST", "/resume")
        for name in replica.held():
            replica.unload(name)
        reset = replica.control("POST", "/reset_prefix_cache?reset_running_requests=true")
        if dig(reset, "success") is False:
            raise Failed(f"/reset_prefix_cache answers {reset}")
        replica.generate()
        # Of several that start together, the first one's flags count.
        with self.changed:
            self.flags = self.flags or flags
            if flags != self.flags:
                raise Failed(f"serves {flags}, the fleet {self.flags}: start it with these flags")
            replica.state, replica.owner = "joining", next(self.owners)
            replica.joined = replica.last_answer = time.monotonic()

    def prove(self, replica):
        """It holds its adapters and generates a token: the failure was not its fault. Failed."""
        if not replica.adapters.items() <= replica.held().items():
            raise Failed("it does not hold its adapters")
        replica.generate()
        with self.changed:
            replica.state, replica.reason, replica.last_answer = "ready", "", time.monotonic()
            self.settle()

    def load_on(self, replica, policy):
        """Have one replica load an adapter. Its answer decides: it has it, or is asked again, or
        the load failed for all, or the replica is at fault and taken out."""
        order = {"lora_name": policy.name, "lora_path": policy.path}
        status, text = replica.attempt("POST", "/v1/load_lora_adapter", order)
        with self.changed:
            now, policy.tries = time.monotonic(), policy.tries + 1
            replica.next_load = now + (0 if status == 200 else RETRY_S)
            if status == 200:
                replica.adapters[policy.name] = policy.path
                return self.settle()
            means = refusal(status, text)
            late = now - max(policy.started, replica.joined) > LOAD_DEADLINE_S
            if policy.state not in HELD or means == "later" and not late:
                return None
            error = f"{policy.name} on {replica.url}: {status} {text[:500]}"
            elsewhere = any(policy.name in other.adapters for other in self.ready())
            if policy.state == "loading" and (means == "never" or late and not elsewhere):
                policy.state, policy.error, self.failure = "failed", error, error
                say(f"{policy.name} failed and is unloaded everywhere: {error}")
                return self.settle()
        return self.take_out(replica, error)

    def check(self, replica):
        now = time.monotonic()
        replica.next_check = now + PROBE_S
        replica.control("GET", "/health")
        oldest = min((flight.began for flight in self.at(replica)), default=now)
        if now - max(oldest, replica.last_answer) > HANG_S:
            raise Failed(f"no answer for {HANG_S} s")

    # ---- one thread for all

    def watch(self):
        """End each request whose client has left (vLLM then aborts it) or whose time is up."""
        while True:
            time.sleep(1)
            for flight in list(self.flights.values()):
                # It was answered and closed meanwhile.
                with contextlib.suppress(ValueError):
                    late = time.monotonic() - flight.began > HOLD_DEADLINE_S
                    if late or closed(flight.client):
                        flight.over = True
                        flight.cut()

    def stats(self):
        with self.changed:
            replicas = [
                {name: getattr(r, name) for name in ("url", "state", "reason", "routed")}
                | {"inflight": len(self.at(r)), "adapters": list(r.adapters)}
                for r in self.replicas
            ]
            seen = {p.name: {**vars(p)} for p in self.policies.values() if p.state != "unloaded"}
        return {"replicas": replicas, "adapters": seen, **{n: self.count[n] for n in COUNTS}}


class Handler(socketserver.BaseRequestHandler):
    """One client connection, one thread."""

    def handle(self):
        self.wire = Wire(self.request, httptools.HttpRequestParser)
        # The client left, or does not speak HTTP.
        with contextlib.suppress(*BROKEN):
            while self.wire.keep or self.wire.messages:
                method, target, _, body = self.wire.receive()
                try:
                    path = target.partition("?")[0]
                    self.serve(self.server.fleet, path, (method, target, body))
                except Failed as error:
                    self.answer(error.status, {"error": {"message": str(error)}})
        self.server.fleet.flights.pop(self, None)

    def serve(self, fleet, path, request):
        data = {}
        # vLLM says what is wrong with it.
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(request[2] or "{}")
        name, lora_path = dig(data, "lora_name"), dig(data, "lora_path")
        if request[0] not in ("GET", "POST"):
            # Without a text, because an answer to HEAD must not have one.
            self.answer(405, b"")
        elif path == "/health":
            up = bool(fleet.ready()) and all(replica.served for replica in fleet.replicas)
            self.answer(200 if up else 503, {"in_service": up, "out": fleet.reasons()})
        elif path == "/stats":
            self.answer(200, fleet.stats())
        elif path == "/v1/load_lora_adapter":
            if not (name and lora_path and isinstance(name, str) and isinstance(lora_path, str)):
                raise Failed("the body must be JSON with 'lora_name' and 'lora_path'", 400)
            fleet.load(name, lora_path)
            self.answer(200, f"Success: LoRA adapter '{name}' accepted.")
        elif path == "/v1/unload_lora_adapter":
            fleet.unload(str(name))
            self.answer(200, f"Success: LoRA adapter '{name}' unloaded.")
        elif path in ("/pause", "/resume"):
            self.answer(200, {"status": "not needed: adapters are loaded while requests run"})
        elif path.startswith(FAN_OUT):
            there = [replica for replica in fleet.replicas if replica.state != "out"]
            answers = [replica.attempt(*request, HOLD_DEADLINE_S) for replica in there]
            status, text = max(answers, default=(503, fleet.reasons()))
            # The worst answer counts.
            self.answer(status, text.encode())
        else:
            self.forward(fleet, path, request, data)

    def forward(self, fleet, path, request, data):
        """Send the request to one replica, and when that fails to another, until one answers."""
        model, tokens = str(dig(data, "model")), dig(data, "prompt") or dig(data, "token_ids")
        # Else it is text.
        tokens = tokens if isinstance(tokens, list) else []
        policy, blocks = fleet.policies.get(model), Router.blocks(model, tokens)
        flight, failures = Flight(self.request), 0
        fleet.flights[self] = flight
        while replica := fleet.route(flight, policy, blocks):
            try:
                status, body, shape = replica.answer(flight, *request)
                # 404: for an adapter that it should hold. 3xx, 401, 403: a gateway's
                failed = status >= 500 or 300 <= status < 400 or status in (401, 403)
                failed = path in GENERATE and (failed or policy and status == 404)
                failures += bool(failed)
            except BROKEN as error:
                status, shape, failed = 502, "text/plain", True
                body = f"{type(error).__name__}: {error}".encode()
                failures += flight.upstream is not None and replica.state != "out"
            finally:
                flight.replica = None
            if flight.over:
                raise Failed(f"{replica.url} did not answer in {HOLD_DEADLINE_S} s", 504)
            # The request itself is to blame.
            if not failed or failures == MAX_FAILURES:
                return self.answer(status, body, {"Content-Type": shape, "X-Replica": replica.url})
            fleet.count["retried"] += 1
            fleet.doubt(replica, f"{path}: {status} {body[:200].decode(errors='replace')}")
        self.abort(fleet, policy, path, tokens)

    def abort(self, fleet, policy, path, tokens):
        """The policy was unloaded: answer as vLLM does when it aborts a request. The sample would
        be too stale, and TRL repeats an error 90 times and then stops the run. With one token,
        because TRL cannot parse an empty completion."""
        fleet.count["aborted"] += 1
        if path != "/v1/completions":
            raise Failed(f"The model `{policy.name}` does not exist: it was unloaded", 404)
        choice = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": tokens[-1:] or [0]}
        choice["logprobs"] = {"token_logprobs": [0.0], "tokens": [""], "text_offset": [0]}
        self.answer(200, {"id": "cmpl-0", "model": policy.name, "choices": [choice]})

    def answer(self, status, body, fields=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.wire.send(f"HTTP/1.1 {status} ", fields or {"Content-Type": JSON}, body)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    # TRL opens its connections all at once
    request_queue_size = 1024


def crash(args):
    """A programming error in a replica's thread is no sick replica: it ends the proxy."""
    sys.excepthook(args.exc_type, args.exc_value, args.exc_traceback)
    os._exit(1)


def main():
    urls = [url.strip(" /") for url in os.environ.get("REPLICA_URLS", "").split(",")]
    host, port = os.environ.get("PROXY_HOST", "127.0.0.1"), os.environ.get("PROXY_PORT", "8000")
    threading.excepthook = crash
    token, key = (os.environ.get(name, "").strip() for name in ("HF_TOKEN", "VLLM_API_KEY"))
    try:
        server = Server((host, int(port)), Handler)
        server.fleet = Fleet(urls, token, key)
    except (OSError, ValueError) as error:
        sys.exit(f"[proxy] REPLICA_URLS={','.join(urls)} PROXY_PORT={port}: {error}")
    address = f"http://{host}:{server.server_address[1]}"
    say(f"{address} in front of {len(urls)} replicas: {', '.join(urls)}")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
