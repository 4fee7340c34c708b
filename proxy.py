"""One address for N vLLM replicas: prefix routing, the bearer token, adapters offered to all.

    REPLICA_URLS=https://a--8000.hf.jobs,https://b--8000.hf.jobs HF_TOKEN=hf_... python proxy.py

Runs in the trainer Job on 127.0.0.1:8000, where TRL's `vllm_server_base_url` points; to TRL it is one vLLM server.
You should see `[proxy] replica 0 (https://...) in service` for each replica, then a line for each adapter and for each
replica that leaves or returns, and a summary a minute. `GET /stats` (JSON) and `GET /metrics` (Prometheus) tell the
rest; `POST /replicas {"urls": [...]}` changes the fleet while it runs.

Environment: REPLICA_URLS (comma-separated), HF_TOKEN (optional), PROXY_HOST (127.0.0.1), PROXY_PORT (8000),
SSL_CERT_FILE (optional: certificates to trust instead of the usual ones).
"""

import collections
import contextlib
import http.client
import itertools
import json
import math
import os
import resource
import select
import signal
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse

import requests

BLOCK = 16  # tokens: vLLM's KV block; only whole blocks can be found again in its prefix cache
MAX_LEAD = 8  # requests: how far a holder of the prefix may be ahead of the least loaded replica and still get it
TABLE_BLOCKS = 500_000  # blocks remembered, the least recently used goes; Router says what they take
UNREAD_BYTES = 64 << 20  # of answers that no next turn has followed yet: 3,000 long ones; the oldest go
PASS_PAUSE = False  # True passes /pause and /resume on: needed only when full weights are swapped under one name
RETRY_S = (0.1, 0.2, 0.4, 0.5)  # s between offers of an adapter that a mount does not show yet; the last one repeats
LOAD_DEADLINE_S = 300  # s until an adapter that a replica never sees counts as failed there
HOLD_DEADLINE_S = 540  # s a request may take in all, waiting included: under TRL's `request_timeout` of 600
HANG_S = 120  # s without any answer, with requests waiting for one, until a replica must prove that it still generates
PROVE_S = 30  # s for that proof, one token
PROBE_S = 2  # s between health checks, of replicas in service and out of it
CONTROL_S = 60  # s for any other control call: loading a 4 MB adapter takes well under one
CLIENT_S = 60  # s for a client to send a request it began, or to take an answer
IDLE_S = 4  # s an idle connection to a replica is used again: vLLM closes them after 5
MAX_RESENDS = 4  # failures after which a request is taken for their cause and gets the error
MAX_BODY = 64 << 20  # bytes of one request
ACCEPTORS = 64  # threads that wait for new connections, however many are open
REPORT_S = 60  # s between summary lines
MANY = -1  # successor of a block that several prompts continue differently (no block: hash() is never -1)
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
COUNTS = ("routed", "affinity", "spilled", "unmatched", "retried", "ejected", "readmitted", "held", "aborted")


def say(text):
    """A line in one write, for several processes share this output: print() may write a line and its end apart."""
    sys.stdout.write(f"[proxy] {text}\n")
    sys.stdout.flush()


class Router:
    """Which replica holds most of a prompt's KV cache. Pure: no I/O, no clock, no lock; owners are small integers.

    The table maps a block's hash to (owners as a bit mask, the one block seen after it or MANY). A block takes about
    190 bytes, so the table is bounded at 95 MB (`python bench/routing.py --memory` measures it). An owner that leaves
    is forgotten by giving it a new number: the old bit is never asked for again.

    Answers wait beside it as they came, UNREAD_BYTES of them, until a prompt goes on where theirs ended: most rollouts
    have one turn, and to read thousands of ids for nothing would be much of a flood's work.
    """

    def __init__(self, capacity=TABLE_BLOCKS):
        self.table, self.capacity, self.turn = collections.OrderedDict(), capacity, 0
        self.answers, self.unread = collections.OrderedDict(), 0  # {last whole block of a prompt: [answer]}; bytes

    @staticmethod
    def blocks(chain, tokens):
        """Hashes of the whole blocks of `tokens` (ids), each chained to the one before, the first to `chain`: like the
        keys of vLLM's prefix cache, which begin with the adapter's name. TypeError if `tokens` are not hashable."""
        out = []
        for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[i : i + BLOCK]))
            out.append(chain)
        return out

    def choose(self, blocks, load):
        """Pick an owner from `load` ({owner: requests in flight}); returns (owner, how).

        A block with more than one successor, this prompt's own included, identifies no prompt: it and all before it
        do not count. "affinity": the longest specific match that is at most MAX_LEAD ahead, the least loaded among
        equals. "spilled": every holder is further ahead. "unmatched": nobody holds it. Both go to the least loaded.
        """
        depth, common, holders = dict.fromkeys(load, 0), 0, list(load)
        for k, block in enumerate(blocks, 1):
            owners, successor = self.table.get(block, (0, None))
            holders = [owner for owner in holders if owners >> owner & 1]
            if not holders:
                break
            depth.update(dict.fromkeys(holders, k))
            if successor == MANY or successor is not None and k < len(blocks) and successor != blocks[k]:
                common = k
        least = min(load.values())
        holders = [owner for owner in load if depth[owner] > common]
        near = [owner for owner in holders if load[owner] <= least + MAX_LEAD]
        if near:
            return max(near, key=lambda owner: (depth[owner], -load[owner])), "affinity"
        idle = [owner for owner in load if load[owner] == least]
        self.turn += 1
        return idle[self.turn % len(idle)], "spilled" if holders else "unmatched"

    def remember(self, blocks, owner):
        """`owner` now holds `blocks`, which follow each other."""
        successor = None
        for block in reversed(blocks):  # the first one last: the tail of a chain is the first to be forgotten
            owners, known = self.table.get(block, (0, None))
            if successor is not None and known != successor:
                known = successor if known is None else MANY
            self.table[block] = (owners | 1 << owner, known)
            self.table.move_to_end(block)
            successor = block
        while len(self.table) > self.capacity:
            self.table.popitem(last=False)

    def heard(self, chain, rest, answer, owner):
        """`owner` generated `answer` (token ids as JSON) after a prompt that ends with the whole block `chain` and the
        ids `rest`: it holds the blocks of both."""
        self.answers.setdefault(chain, []).append((rest, answer, owner))
        self.answers.move_to_end(chain)
        self.unread += len(answer) + 500  # what Python needs beside the text, rounded up
        while self.unread > UNREAD_BYTES:
            self.take(next(iter(self.answers)))

    def take(self, chain):
        answers = self.answers.pop(chain, ())
        self.unread -= sum(len(answer) + 500 for _, answer, _ in answers)
        return answers

    def recall(self, chain, blocks):
        """Remember the answers that a prompt (its blocks, chained to `chain`) can go on from. They are not remembered
        as successors of their prompt's blocks: eight answers to one prompt would make the prompt look common."""
        for block in (chain, *blocks[:-1]):
            for rest, answer, owner in self.take(block):
                with contextlib.suppress(ValueError, TypeError):  # they are not token ids after all
                    self.remember(self.blocks(block, rest + json.loads(answer)), owner)


class Refused(Exception):
    """The proxy's own answer to a request: `status`, and a message that says what to do."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client closed its connection: so must the one to its replica, for vLLM then aborts the request."""


class ReplicaFailed(Exception):
    """A replica did not do what one in service must do; the message says what."""


def closed(sock):
    """Whether the peer of a socket has closed it."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


class Wire:
    """One HTTP/1.1 connection, either side. Heads are split by hand, because `http.client` and `http.server` spend most
    of a small proxy's time in e-mail header parsing. Every wait ends: at `deadline` (TimeoutError), when the peer
    closes (EOFError or another OSError), or when `client`, for whom it is done, closes (ClientGone)."""

    def __init__(self, sock):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.client, self.buffer, self.deadline = sock, None, b"", 0.0

    def wait(self, event=select.POLLIN):
        poll = select.poll()
        poll.register(self.sock, event)
        if self.client:
            poll.register(self.client, select.POLLRDHUP)
        ready = poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000)
        if not ready:
            raise TimeoutError("nothing came before the deadline")
        if self.sock.fileno() not in dict(ready):
            raise ClientGone

    def send(self, data):
        while data:
            try:
                data = memoryview(data)[self.sock.send(data) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                self.wait(select.POLLOUT)

    def receive(self):
        while time.monotonic() < self.deadline:
            try:
                data = self.sock.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                self.wait()
                continue
            if not data:
                raise EOFError("the connection was closed early")
            return data
        raise TimeoutError("it did not end before the deadline")

    def until(self, end):
        """The bytes before the next `end`, which is taken too. ValueError if there are more than 64 KiB."""
        while (size := self.buffer.find(end)) < 0:
            if len(self.buffer) > 1 << 16:
                raise ValueError("no end of the head within 64 KiB")
            self.buffer += self.receive()
        taken, self.buffer = self.buffer[:size], self.buffer[size + len(end) :]
        return taken

    def take(self, size):
        parts, have = [self.buffer], len(self.buffer)
        while have < size:  # joined once: += would copy a long body again for every packet
            parts.append(self.receive())
            have += len(parts[-1])
        data = b"".join(parts)
        self.buffer = data[size:]
        return data[:size]

    def head(self):
        """(the first line's three words, {lower-case name: value}), all bytes. ValueError if this is not HTTP/1."""
        first, *lines = self.until(b"\r\n\r\n").split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") and not words[-1].startswith(b"HTTP/1."):
            raise ValueError("this is not HTTP/1.1")
        fields = (line.partition(b":") for line in lines)
        return words, {name.strip().lower(): value.strip() for name, _, value in fields}

    def body(self, headers):
        """Yield the parts of an answer's body as they come, without their framing."""
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            while size := int(self.until(b"\r\n").split(b";")[0], 16):
                yield self.take(size + 2)[:-2]
            while self.until(b"\r\n"):
                continue  # trailers, up to the empty line
        elif b"content-length" in headers:
            yield self.take(int(headers[b"content-length"]))
        else:  # the end of the connection is the end of the body
            with contextlib.suppress(EOFError):
                while True:
                    part, self.buffer = self.buffer or self.receive(), b""
                    yield part


class Flight:
    """One request at one replica, known there under the replica's `owner` number of that time."""

    def __init__(self, replica, index):
        self.replica, self.index, self.owner, self.wire = replica, index, replica.owner, None
        self.since = time.monotonic()


class Replica:
    """One vLLM server: its URL, its connections, and what the fleet knows of it. The fleet's lock guards the state:
    out, joining (healthy, being given the adapters), ready (in service; `served` from then on), removed."""

    def __init__(self, url, token, owner):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a replica's URL must be http(s)://host[:port], found {url!r}")
        self.url, self.token, self.owner, self.state, self.reason = url, token, owner, "out", "starting"
        self.served, self.base, self.routed, self.flights = False, None, 0, set()
        self.adapters, self.names = {}, set()  # {name: Policy} it holds; names its prefix cache may have blocks of
        self.offers, self.next_offer = {}, 0.0  # {Policy: [how many, time of the first]}; time of the next one
        self.last_answer = self.next_check = 0.0
        self.idle, self.prefix = [], parts.path  # [(connection, last used)]
        self.address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.trusted = os.environ.get("SSL_CERT_FILE") or requests.certs.where()
        self.tls = ssl.create_default_context(cafile=self.trusted) if parts.scheme == "https" else None
        self.auth = {"Authorization": f"Bearer {token}"} if token else {}
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity", **self.auth}
        self.head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    def hide(self, text):
        """What a replica said, fit for logs and answers: some servers and gateways echo the request's headers."""
        return text.replace(self.token, "[HF_TOKEN]") if self.token else text

    def control(self, method, path, accept=(200,), timeout=CONTROL_S, headers=(), **kwargs):
        """One control call, on a connection of its own, for a pooled one may be dead and not every call can be made
        twice. ReplicaFailed if no answer comes or its status is not in `accept`; a redirect would take the token
        along and is not followed."""
        kwargs |= {"headers": {**dict(headers), **self.auth}, "timeout": timeout, "verify": self.trusted}
        try:
            with requests.Session() as session:
                session.trust_env = False  # a ~/.netrc entry would replace the token
                answer = session.request(method, self.url + path, allow_redirects=False, **kwargs)
        except requests.RequestException as error:
            cause = str(error).rsplit(": ", 1)[-1].strip("'\")")  # the innermost of four nested messages
            raise ReplicaFailed(f"{path} {type(error).__name__}: {self.hide(cause)}") from error
        if answer.status_code not in accept:
            raise ReplicaFailed(f"{path} answers {answer.status_code} {self.hide(answer.text)[:300]}".strip())
        return answer

    def unload(self, name):
        self.control("POST", "/v1/unload_lora_adapter", (200, 404), json={"lora_name": name})

    def reset(self):
        """Empty the prefix cache, which is keyed by adapter name: old blocks must never meet new weights."""
        answer = self.control("POST", "/reset_prefix_cache?reset_running_requests=true")
        if b'"success":false' in answer.content.replace(b" ", b""):
            raise ReplicaFailed("/reset_prefix_cache did not succeed")
        self.names = set(self.adapters)  # they fill it again

    def prove(self):
        """Generate one token: /health answers even while the engine hangs. ReplicaFailed if it can't."""
        probe = {"model": self.base, "prompt": [0], "max_tokens": 1}
        self.control("POST", "/v1/completions", timeout=PROVE_S, json=probe)

    def connect(self):
        """A connection: a pooled one that is young enough to be open still (True), or a new one (False)."""
        with contextlib.suppress(IndexError):
            while True:
                wire, used = self.idle.pop()
                if time.monotonic() - used < IDLE_S:
                    return wire, True
                wire.sock.close()
        sock = socket.create_connection(self.address, timeout=10)
        return Wire(self.tls.wrap_socket(sock, server_hostname=self.address[0]) if self.tls else sock), False

    def ask(self, flight, message, client, deadline):
        """Send `message` and wait for the answer's head: (words, headers). A pooled connection that proves dead is
        replaced. OSError, EOFError, ValueError: the replica failed; ClientGone: the client left."""
        while True:
            flight.wire, pooled = self.connect()
            flight.wire.client, flight.wire.deadline = client, deadline
            try:
                if self.owner != flight.owner:  # `cut` came before there was a connection to cut
                    raise EOFError("taken out of service")
                flight.wire.send(message)
                flight.wire.wait()
                return flight.wire.head()
            except (OSError, EOFError):
                flight.wire.sock.close()
                if not pooled or self.owner != flight.owner:
                    raise

    def pool(self, flight, headers):
        """The answer was read to its end: keep the connection if the replica does."""
        self.last_answer = time.monotonic()
        framed = b"content-length" in headers or b"transfer-encoding" in headers
        if framed and b"close" not in headers.get(b"connection", b"").lower():
            self.idle.append((flight.wire, self.last_answer))
            flight.wire = None

    def cut(self):
        """Cut every connection in use: the threads that wait on them send their requests elsewhere."""
        for wire in [flight.wire for flight in list(self.flights)]:
            with contextlib.suppress(OSError):  # closed meanwhile
                if wire:
                    wire.sock.shutdown(socket.SHUT_RDWR)


class Policy:
    """One adapter: a name bound to a path. States: loading, live, failed. `retired` once the trainer has unloaded it:
    its requests under way go on, and it leaves the replicas with the last of them (`users`)."""

    def __init__(self, name, path):
        self.name, self.path, self.state, self.error, self.retired = name, path, "loading", "", False
        self.users, self.attempts, self.started, self.seconds = 0, 0, time.monotonic(), None


def verdict(status, text):
    """What vLLM 0.27.1's refusal of an adapter means. "later": its files are not visible yet, or only some of them are
    (an object store publishes file by file; six texts). "never": no retry can mend it. "sick": it is the replica."""
    never = ("max_lora_rank", "expected target modules", "does not yet support", "only supports", "not supported")
    if status == 500 and "add_lora method failed" in text:
        return "never" if any(words in text for words in never) else "later"
    if status == 404 and "No adapter found" in text or status == 400 and "already been loaded" in text:
        return "later"
    return "sick" if status >= 500 or status in (401, 403) else "never"


class Fleet:
    """All replicas as one server. One thread a replica (`keep`) brings it to what is wanted: admitted, given every
    live adapter in order, probed. Request threads only choose (`route`) and report (`eject`). One lock, `changed`."""

    def __init__(self, urls, token=""):
        self.changed, self.token = threading.Condition(threading.Lock()), token
        self.router, self.owners, self.count = Router(), itertools.count(1), collections.Counter()
        self.replicas, self.policies = [], []  # policies in the order of their loads
        self.config, self.complete = {}, False  # what a replica must serve; whether each was in service once
        self.proven, self.failure = False, ""  # whether a load has succeeded; the error that answers the next load
        self.set_replicas(urls)

    def set_replicas(self, urls):
        """Make the fleet exactly `urls`: the new ones are admitted, the requests of those that left are sent again
        elsewhere. ValueError."""
        urls = list(dict.fromkeys(url.strip().rstrip("/") for url in urls))
        with self.changed:
            left = [replica for replica in self.replicas if replica.url not in urls]
            known = [replica.url for replica in self.replicas]
            new = [Replica(url, self.token, next(self.owners)) for url in urls if url not in known]
            self.replicas = [replica for replica in self.replicas if replica not in left] + new
            for replica in left:
                replica.state, replica.owner, replica.adapters = "removed", next(self.owners), {}
                say(f"{replica.url} removed")
            self.settle()
        for replica in left:
            replica.cut()
        for replica in new:
            threading.Thread(target=self.keep, args=(replica,), daemon=True).start()

    # ---- what request threads call

    @contextlib.contextmanager
    def using(self, model):
        """The policy that a new request names, or None: the base model, or a name that nobody loaded."""
        with self.changed:
            policy = self.bound(model)
            if policy and policy.retired:  # vLLM's own words for an adapter that was unloaded
                raise Refused(404, f"The model `{model}` does not exist.")
            if policy:
                policy.users += 1
        try:
            yield policy
        finally:
            if policy:
                with self.changed:
                    policy.users -= 1
                    if policy.retired:
                        self.settle()

    def route(self, policy, blocks, client, deadline):
        """Choose a replica that holds `policy` and reserve a place there: a Flight. Waits while there is none. Refused
        if the policy failed or the deadline passed, ClientGone if the client left, None if the policy is retired and
        nobody holds it any more."""
        held = False
        with self.changed:
            while True:
                if policy and policy.state == "failed":
                    raise Refused(424, policy.error)
                fit = {r.owner: r for r in self.ready() if policy is None or r.adapters.get(policy.name) is policy}
                if fit:
                    break
                if policy and policy.retired:
                    return None
                if time.monotonic() > deadline:
                    raise Refused(503, f"no replica took the request within {HOLD_DEADLINE_S} s: {self.reasons()}")
                if closed(client):
                    raise ClientGone
                self.count["held"] += not held
                held = True
                self.changed.wait(1)
            owner, how = self.router.choose(blocks, {owner: len(replica.flights) for owner, replica in fit.items()})
            self.router.remember(blocks, owner)
            self.count.update(("routed", how))
            replica = fit[owner]
            replica.routed += 1
            flight = Flight(replica, self.replicas.index(replica))
            replica.flights.add(flight)
            return flight

    def release(self, flight):
        if flight.wire:
            flight.wire.sock.close()
        with self.changed:
            flight.replica.flights.discard(flight)

    def eject(self, replica, owner, reason, retried=0):
        """Take a replica out. `owner` is the number it was known by: late news of an earlier life changes nothing."""
        with self.changed:
            self.count["retried"] += retried
            if replica.owner == owner and replica.state in ("joining", "ready"):
                self.count["ejected"] += replica.state == "ready"
                replica.state, replica.reason, replica.owner = "out", reason, next(self.owners)
                replica.adapters = {}
                say(f"{self.label(replica)} out: {reason}")
                self.settle()

    def load(self, name, path):
        """Offer an adapter to all replicas. Returns once it is accepted: at once, except for the first of a run, which
        proves the set-up and is answered when it is everywhere. Refused: with the error of this load, or of the one
        before it, which had been accepted already. A second load waits for the first."""
        patience = LOAD_DEADLINE_S + HOLD_DEADLINE_S
        with self.changed:
            if not self.changed.wait_for(lambda: not self.loading(), patience):
                raise Refused(503, f"{self.loading().name} is still loading after {patience} s: {self.reasons()}")
            if self.failure:
                error, self.failure = self.failure, ""
                raise Refused(424, error)
            if policy := self.bound(name):
                if (policy.path, policy.state, policy.retired) == (path, "live", False):
                    return
                policy.retired = True  # another binding: it goes before this one comes
            policy = Policy(name, path)
            self.policies.append(policy)
            self.settle()
            if self.proven:
                return
            if not self.changed.wait_for(lambda: policy.state != "loading" or policy.retired, patience):
                self.fail(policy, f"no replica took {name} within {patience} s: {self.reasons()}")
            if policy.state == "failed":
                self.failure = ""
                raise Refused(424, policy.error)

    def unload(self, name):
        """Retire an adapter. Unknown names are fine: the trainer also unloads what an earlier trainer loaded."""
        with self.changed:
            if policy := self.bound(name):
                policy.retired = True
                self.settle()

    # ---- what is true of the fleet; the caller holds the lock

    def ready(self):
        return [replica for replica in self.replicas if replica.state == "ready"]

    def bound(self, name):
        return next((policy for policy in reversed(self.policies) if policy.name == name), None)

    def loading(self):
        return next((policy for policy in self.policies if policy.state == "loading" and not policy.retired), None)

    def wanted(self):
        """What every replica should hold. A retired policy stays for its last requests only while a slot is free:
        in a full replica vLLM would evict it, and could not read it again, for its files go soon after."""
        keep = [policy for policy in self.policies if policy.state != "failed" and not policy.retired]
        last = [policy for policy in self.policies if policy.retired and policy.users]
        return keep + last[max(0, len(last) + len(keep) - (self.config.get("max_loras") or 1)) :]

    def label(self, replica):
        """The name in every line: a slot's number, from 1 as launch.sh counts them, and the address."""
        return f"replica {self.replicas.index(replica) + 1 if replica in self.replicas else '-'} ({replica.url})"

    def reasons(self):
        out = [f"{self.label(r)} {r.state}: {r.reason}" for r in self.replicas if r.state != "ready"]
        return "; ".join(out) or "all replicas are in service"

    def settle(self):
        """Draw the conclusions of a change: a load is done when every replica in service has it, and a policy that is
        retired, unused and nowhere held is forgotten."""
        policy, ready = self.loading(), self.ready()
        if policy and ready and all(replica.adapters.get(policy.name) is policy for replica in ready):
            policy.state, policy.seconds, self.proven = "live", time.monotonic() - policy.started, True
            tries = ", ".join(str(replica.offers[policy][0]) for replica in ready)
            where = f"{len(ready)}/{len(self.replicas)} replicas"
            say(f"{policy.name} on {where} after {policy.seconds:.1f} s ({tries} tries)")
        held = [policy for replica in self.replicas for policy in replica.adapters.values()]
        self.policies = [p for p in self.policies if not p.retired or p.users or p in held]
        self.changed.notify_all()

    def fail(self, policy, error):
        policy.state, policy.error, self.failure = "failed", error, error
        say(f"{policy.name} failed, rolled back: {error}")
        self.settle()

    # ---- one thread a replica

    def keep(self, replica):
        while replica.state != "removed":
            owner = replica.owner
            try:
                if replica.state == "out":
                    self.admit(replica, owner)
                self.step(replica)
            except (ReplicaFailed, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = str(error) if isinstance(error, ReplicaFailed) else f"unexpected answer: {error!r}"
                self.eject(replica, owner, reason)
                replica.cut()
                with self.changed:
                    if replica.state == "out" and replica.reason != reason:
                        replica.reason = reason
                        say(f"{self.label(replica)} out: {reason}")
                    self.changed.wait(PROBE_S)

    def admit(self, replica, owner):
        """Healthy, like its peers, clean, able to generate: then it may join. ReplicaFailed says what is wrong."""
        replica.control("GET", "/health", timeout=PROVE_S)
        info = replica.control("GET", "/server_info?config_format=json", (200, 404))
        if info.status_code == 404:
            raise ReplicaFailed("has no /server_info: start it with VLLM_SERVER_DEV_MODE=1")
        info = info.json().get("vllm_config", {})
        model, lora = info.get("model_config") or {}, info.get("lora_config") or {}
        config = {key: model.get(key) for key in ("model", "dtype", "max_model_len")}
        config |= {key: lora.get(key) for key in ("max_loras", "max_lora_rank")}
        with self.changed:
            if not self.policies and all(other.state == "out" for other in self.replicas):
                self.config = config
            for key, value in self.config.items():
                if config[key] != value:
                    text = f"serves {key}={config[key]} (the fleet: {value}): start it with the fleet's flags"
                    raise ReplicaFailed(text)
        if replica.control("GET", "/is_paused").json().get("is_paused"):
            replica.control("POST", "/resume")
        cards = replica.control("GET", "/v1/models").json().get("data", [])
        replica.base = next((card["id"] for card in cards if not card.get("parent")), None)
        for name in [card["id"] for card in cards if card.get("parent")]:
            replica.unload(name)
        replica.reset()
        if replica.served:
            replica.prove()
        with self.changed:
            if replica.owner == owner:
                replica.state, replica.adapters, replica.offers = "joining", {}, {}
                replica.next_check = time.monotonic() + PROBE_S

    def step(self, replica):
        """One thing at a time: unload what is not wanted, offer what is missing, probe, or wait for news."""
        with self.changed:
            now, wanted = time.monotonic(), self.wanted()
            surplus = [policy for policy in replica.adapters.values() if policy not in wanted]
            taken = {*replica.adapters, *(policy.name for policy in self.policies if policy.retired and policy.users)}
            missing = [policy for policy in wanted if not policy.retired and policy.name not in taken]
            if replica.state == "joining" and not surplus and all(policy.state == "loading" for policy in missing):
                self.count["readmitted"] += replica.served
                replica.state, replica.reason, replica.last_answer, replica.served = "ready", "", now, True
                self.complete = self.complete or all(r.served for r in self.replicas)
                say(f"{self.label(replica)} in service, holds {', '.join(replica.adapters) or 'no adapter'}")
                self.settle()
            due = min(replica.next_check, replica.next_offer if missing else math.inf)
            if replica.state not in ("joining", "ready") or not surplus and now < due:
                self.changed.wait(max(0, due - now))
                return
        if surplus:
            replica.unload(surplus[0].name)
            with self.changed:
                replica.adapters.pop(surplus[0].name, None)
                replica.offers.pop(surplus[0], None)
                self.settle()
        elif missing and now >= replica.next_offer:
            self.offer(replica, missing[0])
        else:
            self.check(replica)

    def offer(self, replica, policy):
        """Ask a replica to load an adapter. What it answers decides: it has it, or is asked again, or the load failed,
        or the replica did (ReplicaFailed)."""
        if policy.name in replica.names:
            replica.reset()
        order = {"lora_name": policy.name, "lora_path": policy.path}
        answer = replica.control("POST", "/v1/load_lora_adapter", range(1000), json=order)
        status, text = answer.status_code, replica.hide(answer.text)[:500]
        meaning = verdict(status, text)
        if "already been loaded" in text:  # by somebody else, with other weights perhaps
            replica.unload(policy.name)
        with self.changed:
            now = time.monotonic()
            offers = replica.offers.setdefault(policy, [0, now])
            offers[0] += 1
            policy.attempts += 1
            replica.next_offer = now + (0 if status == 200 else RETRY_S[min(offers[0], len(RETRY_S)) - 1])
            if status == 200 or "already been loaded" in text:
                replica.names.add(policy.name)
            if status == 200:
                replica.adapters[policy.name] = policy
                return self.settle()
            if policy not in self.wanted() or meaning == "later" and now - offers[1] < LOAD_DEADLINE_S:
                return None
            error = f"{policy.name} on {self.label(replica)}, try {offers[0]}: {status} {text}"
            if status == 404 and meaning == "never":
                error += ": start the replica with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            elsewhere = any(policy.name in other.adapters for other in self.ready())  # then this mount is to blame
            final = meaning == "never" or meaning == "later" and not elsewhere
            if final and policy.state == "loading" and replica.state == "ready":
                return self.fail(policy, error)
        raise ReplicaFailed(error)

    def check(self, replica):
        replica.next_check = time.monotonic() + PROBE_S
        replica.control("GET", "/health", timeout=PROVE_S)
        now = time.monotonic()
        oldest = min((flight.since for flight in list(replica.flights)), default=now)
        if now - max(oldest, replica.last_answer) > HANG_S:
            try:
                replica.prove()
            except ReplicaFailed as error:
                raise ReplicaFailed(f"hangs: no answer for {HANG_S} s, and no token on request: {error}") from error
            replica.last_answer = time.monotonic()

    # ---- seen from outside

    def health(self):
        with self.changed:
            up, status = len(self.ready()), 200 if self.ready() and self.complete else 503
            return status, {"in_service": up, "replicas": len(self.replicas), "out": self.reasons()}

    def stats(self):
        keys, of_policy = ("url", "state", "reason", "routed"), ("path", "state", "attempts", "seconds")
        with self.changed:
            replicas = [
                {key: getattr(r, key) for key in keys} | {"inflight": len(r.flights), "adapters": list(r.adapters)}
                for r in self.replicas
            ]
            adapters = {policy.name: {key: getattr(policy, key) for key in of_policy} for policy in self.policies}
            counts = {name: self.count[name] for name in COUNTS}
            return {"replicas": replicas, **counts, "adapters": adapters, "tracked_blocks": len(self.router.table)}

    def metrics(self):
        """The numbers of `stats` in Prometheus text format 0.0.4."""
        stats = self.stats()
        rows = [(f"{name}_total counter", "", stats[name]) for name in COUNTS]
        rows += [("tracked_blocks gauge", "", stats["tracked_blocks"])]
        for i, replica in enumerate(stats["replicas"]):
            label = f'{{replica="{i}"}}'
            rows += [("replica_routed_total counter", label, replica["routed"])]
            rows += [("replica_inflight gauge", label, replica["inflight"])]
            rows += [("replica_ready gauge", label, int(replica["state"] == "ready"))]
        text = ""
        for name, group in itertools.groupby(sorted(rows), key=lambda row: row[0]):
            text += f"# TYPE lora_proxy_{name}\n"
            text += "".join(f"lora_proxy_{name.split()[0]}{label} {value}\n" for _, label, value in group)
        return text

    def report(self):
        """One summary line a minute."""
        before = self.stats()
        while True:
            time.sleep(REPORT_S)
            now = self.stats()
            new = {name: now[name] - before[name] for name in COUNTS}
            share = ", ".join(f"{how} {new[how] / max(1, new['routed']):.1%}" for how in COUNTS[1:4])
            states, flying = [r["state"] for r in now["replicas"]], sum(r["inflight"] for r in now["replicas"])
            say(
                f"{states.count('ready')}/{len(states)} in service, {flying} in flight; since the last line "
                f"{new['routed']} routed ({share}), {new['retried']} sent again, {new['held']} held"
            )
            before = now


class Handler:
    """One client connection, one thread: read a request, dispatch it by route, answer, until the client closes."""

    def __init__(self, client, fleet):
        self.wire, self.client, self.fleet, self.keep_alive = Wire(client), client, fleet, True
        # The kernel ends this socket's waits: a poll before each recv would be a system call, and a turn of the
        # interpreter's lock among hundreds of threads, more
        limit = struct.pack("ll", int(CLIENT_S), int(CLIENT_S % 1 * 1e6))
        client.setblocking(True)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def handle(self):
        while self.keep_alive:
            self.wire.deadline = time.monotonic() + 24 * 3600  # idle
            self.wire.buffer = self.wire.buffer or self.wire.receive()
            self.wire.deadline = time.monotonic() + CLIENT_S
            try:
                self.read()
                self.dispatch()
            except Refused as error:
                kind = http.client.responses[error.status]
                self.json(error.status, {"error": {"message": str(error), "type": kind, "code": error.status}})

    def read(self):
        """Read one request. After one whose end is unclear the connection can't be used again."""
        self.keep_alive = self.framed = False
        try:
            words, headers = self.wire.head()
            self.method, self.target, version = (word.decode("latin-1") for word in words)
        except ValueError as error:
            raise Refused(400, f"this is not HTTP/1.1: {error}") from error
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if b"transfer-encoding" in headers:
            raise Refused(411, "chunked bodies are not taken: send Content-Length")
        if not length.isdecimal():
            raise Refused(400, f"Content-Length must be a number, found {length[:40]!r}")
        if len(length) > 12 or int(length) > MAX_BODY:
            raise Refused(413, f"at most {MAX_BODY} bytes are taken, Content-Length is {length[:40]}")
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self.wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            self.body = self.wire.take(int(length))
        except EOFError as error:
            raise Refused(400, f"the body ended before its {length} bytes (Content-Length)") from error
        except TimeoutError as error:
            raise Refused(408, f"the body's {length} bytes (Content-Length) did not come in {CLIENT_S} s") from error
        self.path, self.framed = self.target.partition("?")[0], version == "HTTP/1.1"
        self.kind = headers.get(b"content-type", b"application/json").decode("latin-1")
        self.keep_alive = self.framed and b"close" not in headers.get(b"connection", b"").lower()

    def dispatch(self):
        route, fleet = f"{self.method} {self.path}", self.fleet
        if self.method not in ("GET", "POST"):
            raise Refused(405, f"{self.method} is not supported, only GET and POST")
        if route == "GET /health":
            self.json(*fleet.health())
        elif route == "GET /stats":
            self.json(200, fleet.stats())
        elif route == "GET /metrics":
            self.answer(200, fleet.metrics().encode(), b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
        elif route == "POST /replicas":
            try:
                fleet.set_replicas(self.fields(urls=list)["urls"])
            except (ValueError, AttributeError) as error:
                raise Refused(400, f"'urls' must be a list of http(s) URLs: {error}") from error
            self.json(200, fleet.stats())
        elif route == "POST /v1/load_lora_adapter":
            order = self.fields(lora_name=str, lora_path=str)
            fleet.load(order["lora_name"], order["lora_path"])
            self.json(200, f"Success: LoRA adapter '{order['lora_name']}' accepted.")
        elif route == "POST /v1/unload_lora_adapter":
            name = self.fields(lora_name=str)["lora_name"]
            fleet.unload(name)
            self.json(200, f"Success: LoRA adapter '{name}' retired.")
        elif self.path in ("/pause", "/resume") and not PASS_PAUSE:
            self.json(200, {"status": "not needed: adapters are loaded while requests run"})
        elif self.method == "POST" and self.path in COMPLETIONS:
            self.complete()
        elif self.method == "GET" or self.path.startswith("/v1/") or self.path in ("/tokenize", "/detokenize"):
            self.forward()
        else:
            self.broadcast()

    def fields(self, **kinds):
        """The request's JSON object, in which each of `kinds` (name=type) is there and not empty."""
        try:
            data = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(data, dict) or not all(data.get(key) and isinstance(data[key], kinds[key]) for key in kinds):
            wanted = "".join(f" with {key!r} (a {kind.__name__})" for key, kind in kinds.items())
            raise Refused(400, f"the body must be a JSON object{wanted}, found {json.dumps(data)[:200]}")
        return data

    def complete(self):
        data = self.fields()
        model, prompt = data.get("model") or "", data.get("prompt") or data.get("messages")
        if not isinstance(model, str) or not isinstance(prompt, (list, str)) or not prompt:
            raise Refused(400, "'model' must be a name, and 'prompt' token ids or text, or 'messages' a list")
        tokens = prompt if isinstance(prompt, list) and type(prompt[0]) is int else []
        try:
            blocks = Router.blocks(hash(model), tokens)
        except TypeError as error:
            raise Refused(400, f"'prompt' must hold token ids only: {error}") from error
        with self.fleet.using(model) as policy:
            with self.fleet.changed:
                self.fleet.router.recall(hash(model), blocks)
            self.forward(policy, model, tokens, blocks)

    def forward(self, policy=None, model="", tokens=(), blocks=()):
        """Send the request to one replica, and whenever that one fails to another, until one answers."""
        fleet, deadline, failures = self.fleet, time.monotonic() + HOLD_DEADLINE_S, 0
        while True:
            flight = fleet.route(policy, blocks, self.client, deadline)
            if flight is None:
                return self.abort(policy, tokens)
            replica, answer = flight.replica, None
            try:
                words, headers = replica.ask(flight, self.message(replica), self.client, deadline)
                if words[1] == b"200" and headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                    return self.stream(flight, headers)
                status = int(words[1])
                answer = b"" if status in (204, 304) else b"".join(flight.wire.body(headers))
                replica.pool(flight, headers)
            except (OSError, EOFError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise Refused(504, f"{replica.url} did not answer within {HOLD_DEADLINE_S} s") from error
                reason = f"{self.path} {type(error).__name__}: {error}"
            finally:
                fleet.release(flight)
            if answer is not None:
                # 404: for an adapter it should hold. 3xx, 401, 403: from a gateway, for the token is not the client's
                sick = status >= 500 or 300 <= status < 400 or status in (401, 403) or policy and status == 404
                guilty = status >= 500 and failures >= MAX_RESENDS
                if not sick or guilty or self.path not in COMPLETIONS:
                    if tokens and status == 200:
                        self.learn(model, tokens, blocks, flight.owner, answer)
                    return self.relay(flight, status, headers, answer)
                reason = f"{self.path} answers {status} {replica.hide(answer.decode(errors='replace'))[:200]}".strip()
            if failures >= MAX_RESENDS:
                raise Refused(502, f"{failures + 1} times a replica failed with this request, the last time: {reason}")
            failures += answer is not None or flight.wire is not None  # a refused connection is not the request's fault
            fleet.eject(replica, flight.owner, reason, retried=1)

    def message(self, replica):
        """The request as the replica gets it: the client's own header fields stay here."""
        head = f"{self.method} {replica.prefix}{self.target} HTTP/1.1\r\n{replica.head}"
        if self.method == "POST":
            head += f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
        return f"{head}\r\n".encode("latin-1") + self.body

    def learn(self, model, tokens, blocks, owner, answer):
        """The next turn of this conversation begins with prompt and answer, whose KV blocks `owner` has."""
        ids, end, _ = answer.partition(b'"token_ids":[')[2].partition(b"]")
        if end:  # else none were asked for, or the answer is compressed
            chain, rest = blocks[-1] if blocks else hash(model), tokens[len(blocks) * BLOCK :]
            with self.fleet.changed:
                self.fleet.router.heard(chain, rest, b"[%b]" % ids, owner)

    def relay(self, flight, status, headers, answer):
        if status >= 400:
            answer = flight.replica.hide(answer.decode("latin-1")).encode("latin-1")
        own = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server")
        kept = b"".join(b"%b: %b\r\n" % field for field in headers.items() if field[0] not in own)
        self.answer(status, answer, kept + b"X-Replica: %d\r\n" % flight.index)

    def stream(self, flight, headers):
        """Pass server-sent events on as they come. Once begun, an answer can't be begun again elsewhere: if the
        replica fails now, the client's connection is cut, which is what it would have seen without a proxy."""
        framing = b"Transfer-Encoding: chunked\r\n" if self.framed else b"Connection: close\r\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%bX-Replica: %d\r\n\r\n"
        self.send(head % (headers[b"content-type"], framing, flight.index))
        parts, part = flight.wire.body(headers), b"-"
        while part:
            try:
                part = next(parts, b"")
            except (OSError, EOFError, ValueError) as error:
                if time.monotonic() < flight.wire.deadline:
                    self.fleet.eject(flight.replica, flight.owner, f"{self.path} {type(error).__name__}: {error}")
                raise ClientGone from error
            self.send(b"%x\r\n%b\r\n" % (len(part), part) if self.framed else part)
        flight.replica.pool(flight, headers)

    def abort(self, policy, tokens):
        """Nobody holds the policy any more, so the rollout can't go on; it is beyond max_staleness, so TRL will drop
        its sample. An error TRL would try again 90 times and then die of; so it gets an answer like that to an aborted
        request, with one token, for its parser of answers breaks on none."""
        with self.fleet.changed:
            self.fleet.count["aborted"] += 1
        if self.path != "/v1/completions":
            raise Refused(404, f"The model `{policy.name}` does not exist.")
        logprobs = {"text_offset": [0], "token_logprobs": [0.0], "tokens": [""], "top_logprobs": [None]}
        choice = {"index": 0, "text": "", "token_ids": [*tokens[-1:]] or [0], "logprobs": logprobs}
        choice |= {"finish_reason": "abort", "stop_reason": None}
        self.json(200, {"id": "cmpl-0", "object": "text_completion", "model": policy.name, "choices": [choice]})

    def broadcast(self):
        """A request that changes state goes to every replica in service; the worst answer is the answer."""
        how = {"accept": range(1000), "timeout": HOLD_DEADLINE_S, "headers": {"Content-Type": self.kind}}
        with self.fleet.changed:
            ready, answers = self.fleet.ready(), []
        for replica in ready:
            owner = replica.owner
            try:
                answers.append(replica.control(self.method, self.target, data=self.body, **how))
            except ReplicaFailed as error:
                self.fleet.eject(replica, owner, str(error))
        if not answers:
            raise Refused(503, f"no replica answered: {self.fleet.reasons()}")
        worst = max(answers, key=lambda answer: answer.status_code)
        self.answer(worst.status_code, ready[0].hide(worst.text).encode(), b"Content-Type: application/json\r\n")

    def json(self, status, data):
        self.answer(status, json.dumps(data).encode(), b"Content-Type: application/json\r\n")

    def answer(self, status, body, fields):
        line = f"HTTP/1.1 {status} {http.client.responses.get(status, '')}\r\nContent-Length: {len(body)}\r\n"
        self.send(b"%b%b%b\r\n%b" % (line.encode(), fields, b"" if self.keep_alive else b"Connection: close\r\n", body))

    def send(self, data):
        self.wire.deadline = time.monotonic() + CLIENT_S
        try:
            self.wire.send(data)
        except OSError as error:
            raise ClientGone from error


def serve(listener, fleet):
    """Accept a connection, start another thread in this one's place, and serve. ACCEPTORS of them wait: a single thread
    that accepts for all would need a turn among hundreds for each, and the last of a flood would wait for them all."""
    replaced = False
    while not replaced:
        try:
            client = listener.accept()[0]
        except OSError:  # too many open files, for instance: others will be closed
            if listener.fileno() < 0:
                return  # closed, for good
            time.sleep(0.1)
            continue
        with contextlib.suppress(RuntimeError):  # no thread to be had: this one comes back
            threading.Thread(target=serve, args=(listener, fleet), daemon=True).start()
            replaced = True
        with client, contextlib.suppress(ClientGone, OSError, EOFError):  # nobody is left to answer
            Handler(client, fleet).handle()
            client.shutdown(socket.SHUT_WR)


def main():
    urls = [url for url in os.environ.get("REPLICA_URLS", "").split(",") if url.strip()]
    if not urls:
        sys.exit("[proxy] REPLICA_URLS is empty: give the replicas' URLs, separated by commas")
    address = os.environ.get("PROXY_HOST", "127.0.0.1"), int(os.environ.get("PROXY_PORT", "8000"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two sockets a request: 384 come near the usual 1,024
    try:
        listener = socket.create_server(address, backlog=1024)
    except OSError as error:
        sys.exit(f"[proxy] cannot listen on {address[0]}:{address[1]}: {error}. Set PROXY_PORT to a free port")
    say(f"http://{address[0]}:{address[1]} in front of {len(urls)} replicas: {', '.join(urls)}")
    try:
        fleet = Fleet(urls, os.environ.get("HF_TOKEN", "").strip())
    except ValueError as error:
        sys.exit(f"[proxy] REPLICA_URLS: {error}")
    # Each thread that waits for its turn wakes up at this interval (s) to ask for it: with hundreds and the usual 0.005
    # much work, and to no end, for each gives its turn up soon, when it waits for a socket.
    sys.setswitchinterval(0.05)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for _ in range(ACCEPTORS):
        threading.Thread(target=serve, args=(listener, fleet), daemon=True).start()
    try:
        fleet.report()
    except KeyboardInterrupt:
        say("stopped")


if __name__ == "__main__":
    main()
