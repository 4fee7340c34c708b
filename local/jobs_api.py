"""A stand-in for the Hugging Face Jobs API: the real `hf` CLI talks to it, and its Jobs are
processes of this machine.

Alone it prints its address and serves until a signal ends it:

    $ python local/jobs_api.py --state /tmp/jobs
    [jobs] http://127.0.0.1:40137

    $ export HF_ENDPOINT=http://127.0.0.1:40137 HF_TOKEN=anything           # in another shell
    $ hf jobs run --detach --quiet python:3.12 python3 -c 'print("hello")'
    5b1c3e0c9d3f4f6f9a1a2b3c
    $ hf jobs logs -f 5b1c3e0c9d3f4f6f9a1a2b3c
    hello

Around a command it is what the command finds in HF_ENDPOINT. It ends when the command ends, with
the command's exit code; Ctrl-C is the command's:

    $ python local/jobs_api.py --state /tmp/jobs --log /tmp/jobs.log -- ./launch.sh

It starts in half a second, costs nothing, and needs Linux (/proc, setpriv), Python 3.11 and
aiohttp. STATE/jobs/ID has a Job's record (job.json), its log and its working directory (work).
Requests and answers have the shapes that huggingface_hub 2.4.0 sends and reads (_jobs_api.py,
hf_api.py, _buckets.py).

As on Hugging Face: stages, timeout, attempts, cancel, live and replayed logs, labels, the token
that an exposed port demands, and the end of everything that a Job started when its command ends.
Every token is the user `local`'s, who is in the organisation `lab`, too. One that begins with
"readonly" may not create Jobs.

Different, because a Job is a process and not a container:
  1. The image is ignored: the command runs with this machine's programs, in an empty directory.
  2. A bucket is a directory and a mount is a symbolic link to it, so `:ro` is a promise. With
     --reader-buckets each Job has a mount namespace of its own: there a read-only volume shows the
     same bucket below that other directory (a mirror that lags, a FUSE mount), and refuses writes.
     Files come and go in the directory: uploads and downloads with `hf` need the Xet protocol.
  3. Jobs share this machine's ports. An exposed port is reached through a port of its own, which
     is in exposeUrls, and through HF_ENDPOINT/exposed/JOB_ID/PORT/..., which can be written down
     once the id is known, as https://ID--PORT.hf.jobs can. A Job that exposes a port and has the
     word `vllm` in its command is told in JOB_PORT which port to bind in place of the (first)
     exposed one, so that several can run. WebSockets do not pass.
  4. SIGTERM reaches all processes of a Job; in a container the first one alone gets it.
  5. A Job in a network group is told HF_NETWORK_GROUP_PREFIX, but its aliases have no address.
  6. A Job gets PATH, HOME, TMPDIR, LANG and what JOBS_API_PASS names of this process's environment.

For tests: SIGUSR1 cuts every connection to an exposed port, as a network that fails would. While a
file STATE/refuse exists, no Job can be created (503). --max-jobs N is a credit for N Jobs at a time
(402).

When this process ends, however it ends, its Jobs end: a forked watchdog sees to it.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

import aiohttp
from aiohttp import web
from yarl import URL

USER = "local"  # whose tokens all tokens are
OWNERS = {  # of Jobs and buckets: the namespaces that there are
    USER: {"type": "user", "id": "0" * 24, "name": USER, "isPro": True, "canPay": True},
    "lab": {"type": "org", "id": "1" * 24, "name": "lab", "canPay": True, "roleInOrg": "admin"},
}
PRICES = {"cpu-basic": 0.01, "h200": 5.0, "h200x2": 10.0}  # of the flavors, $ per hour
DEFAULTS = {"dockerImage": "", "spaceId": "", "command": [], "arguments": [], "flavor": ""}
DEFAULTS |= {"environment": {}, "secrets": {}, "labels": {}, "volumes": [], "network": {}}
DEFAULTS |= {"expose": {}, "attempts": 1, "timeoutSeconds": 30 * 60}  # as on Hugging Face
TERMINAL = {"COMPLETED", "CANCELED", "ERROR"}  # stages
POLL_S = 0.05  # between two looks at a Job's processes, or at a log that is followed
KILL_DEADLINE_S = 30  # from SIGKILL to the end; only a process stuck in the kernel takes longer
HOP_BY_HOP = {"connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}

here = argparse.Namespace()  # of this stand-in: options, endpoint, HTTP client, watchdog
jobs: dict[str, "Job"] = {}  # by id, the oldest first
exposed_connections = weakref.WeakSet()  # whose newest request is to an exposed port


def require(condition: object, message: str, status: int = 400, **body: str) -> None:
    """Unless `condition` holds, refuse as the Hub does: the CLI reads the headers or the body."""
    if not condition:
        code = "RepoNotFound" if status == 404 else ""  # how the CLI knows a missing bucket
        headers = {"X-Error-Message": " ".join(message.split()), "X-Error-Code": code}
        text = json.dumps({"error": message, **body})
        refusal = web.HTTPBadRequest(headers=headers, text=text, content_type="application/json")
        refusal.set_status(status)
        raise refusal


def iso(seconds: float) -> str:
    """Seconds since the epoch as the Hub writes times: 2026-09-10T12:00:00.000Z."""
    return time.strftime("%FT%T.", time.gmtime(seconds)) + f"{int(seconds * 1000) % 1000:03}Z"


# ---- Processes: find and end all of a Job's, also when the stand-in itself is gone ---------------


def job_processes(job_id: str, session: int) -> set[int]:
    """Pids of a Job's living processes.

    They are those in its `session`, those that left it but inherited JOB_ID, and all descendants of
    either (a program that sets its process title overwrites the environment that /proc shows).
    """
    marker, found, parents = f"JOB_ID={job_id}".encode(), set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended just now, or is another user's
            # "pid (command) state ppid pgrp session ...": a command may hold spaces and parentheses
            stat = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] not in b"ZX":  # else it has ended
                parents[int(entry.name)] = int(stat[1])
                environment = (entry / "environ").read_bytes().split(b"\0")
                if int(stat[3]) == session or marker in environment:
                    found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


async def end_processes(job_id: str, session: int, grace: float) -> None:
    # SIGTERM, and after `grace` seconds (0: at once) SIGKILL, until none of a Job's processes is
    # left. SIGTERM is sent once: what a process then starts to clean up is not disturbed.
    kill_at, signum = time.monotonic() + grace, signal.SIGTERM
    while (pids := job_processes(job_id, session)) and time.monotonic() < kill_at + KILL_DEADLINE_S:
        for pid in pids:
            with suppress(OSError):  # it ended after the look, or is another user's
                os.kill(pid, signum if time.monotonic() < kill_at else signal.SIGKILL)
        signum = 0
        await asyncio.sleep(POLL_S)


def start_watchdog() -> None:
    """Fork a process that cleans up what this one leaves behind, however this one ends.

    It reads what is to be cleaned up, a Job's id or a mount point a line, from a pipe, whose end is
    this process's end. It is forked before anything else, so it holds none of this one's sockets.
    """
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)
        here.watchdog = os.fdopen(write_end, "w", buffering=1)
        return
    os.close(write_end)
    os.setsid()  # a signal to the stand-in's process group is not for the watchdog
    for line in os.fdopen(read_end).read().splitlines():
        if not line.startswith("/"):
            asyncio.run(end_processes(line, session=-1, grace=0))
        else:
            with suppress(OSError):  # somebody else uses it, or has removed it
                os.unlink(line) if os.path.islink(line) else os.rmdir(line)
    os._exit(0)


# ---- Buckets: directories, and how a Job sees them -----------------------------------------------

# Bind mounts are visible to one Job alone. The arguments: SOURCE TARGET OPTIONS ... -- COMMAND
BIND = 'while [ "$1" != -- ]; do mount -o "$3" "$1" "$2" || exit; shift 3; done; shift; exec "$@"'


def bucket_path(bucket: str) -> Path:
    """Directory of bucket OWNER/NAME."""
    require(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", bucket), f"Invalid bucket id: {bucket}")
    return here.buckets / bucket


def bucket_info(bucket: str) -> dict:
    """The bucket as the Hub shows it."""
    require((path := bucket_path(bucket)).is_dir(), f"Bucket {bucket} not found", 404)
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    info = {"id": bucket, "private": True, "createdAt": iso(path.stat().st_ctime)}
    return info | {"size": sum(sizes), "totalFiles": len(sizes)}


def bucket_tree(bucket: str, pattern: str) -> list[dict]:
    """The files and folders of a bucket that match a glob pattern."""
    root, items = bucket_path(bucket), []
    for path in sorted(root.glob(pattern)):
        kind = {"type": "directory"} if path.is_dir() else {"type": "file", "xetHash": ""}
        named = {"path": str(path.relative_to(root)), "uploadedAt": iso(path.stat().st_mtime)}
        items.append(kind | named | {"size": path.stat().st_size})
    return items


def mounted(volumes: list[dict], command: list[str]) -> list[str]:
    """Make the mount points of `volumes`; returns `command` inside of what shows them to it."""
    binds = []
    for volume in volumes:
        require(volume["type"] == "bucket", "Only bucket volumes can be mounted here")
        bucket, target = volume["source"], Path(volume["mountPath"])
        require(target.is_absolute(), f"{target} is not an absolute mount path")
        folder = bucket_path(bucket) / f"./{volume.get('path', '')}"
        require(folder.is_dir(), f"no bucket {bucket}, or no folder '{volume.get('path')}' in it")
        if here.reader_buckets and volume.get("readOnly"):
            folder = here.reader_buckets.resolve() / folder.relative_to(here.buckets)
            folder.mkdir(parents=True, exist_ok=True)  # its copy may be still to come
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            target.mkdir() if here.reader_buckets else target.symlink_to(folder)
            here.watchdog.write(f"{target}\n")
        usable = target.is_dir() if here.reader_buckets else target.resolve() == folder.resolve()
        require(usable, f"{target} exists and is no link to {folder}, or no directory")
        binds += [str(folder), str(target), "bind,ro" if volume.get("readOnly") else "bind"]
    require(not here.reader_buckets or os.geteuid() == 0, "--reader-buckets needs root", 500)
    bind = ["unshare", "--mount", "sh", "-c", BIND, "sh", *binds, "--"]
    return [*bind, *command] if here.reader_buckets else command


# ---- A Job ---------------------------------------------------------------------------------------


def checked(payload: dict) -> dict:
    """The specification of a new Job, complete and valid."""
    spec = {field: payload.get(field, default) for field, default in DEFAULTS.items()}
    for field, default in DEFAULTS.items():
        kind = type(default)
        require(isinstance(spec[field], kind), f"{field} must be a {kind.__name__}")
        require(kind is not int or spec[field] > 0, f"{field} must be positive")
    for field in ("environment", "secrets", "labels"):
        require({*map(type, spec[field].values())} <= {str}, f"{field} must map strings to strings")
    command, flavor = spec["command"] + spec["arguments"], spec["flavor"]
    require({*map(type, command)} == {str}, "command must be a list of strings")
    require(flavor in PRICES, f"Invalid flavor {flavor}: expected one of {', '.join(PRICES)}")
    ports = spec["expose"].get("ports", [])
    require(all(port in range(1, 65536) for port in ports), f"Invalid ports to expose: {ports}")
    for label in map("=".join, spec["labels"].items()):  # the rule is in HfApi.update_job_labels
        valid = re.fullmatch(r"[\w-]{1,100}=[\w.-]{0,100}", label, re.ASCII)
        require(valid, f"Invalid label {label}: at most 100 letters, digits, dashes, underscores")
    return spec


class Job:
    """One Job: its record, its log, its processes and its exposed ports.

    `spec` is the checked payload, `token` what the exposed ports demand. Token and secrets stay in
    memory: neither the record nor any file holds them.
    """

    def __init__(self, owner: str, spec: dict, token: str):
        self.owner, self.spec, self.token = owner, spec, token
        command = spec["command"] + spec["arguments"]
        self.argv = mounted(spec["volumes"], command)
        self.id = os.urandom(12).hex()
        self.folder = here.state / "jobs" / self.id
        (self.folder / "work").mkdir(parents=True)
        (self.folder / "log").touch()
        self.times = {"createdAt": time.time()}
        self.stage, self.message = "SCHEDULING", None
        self.outcome: tuple = ()  # the stage and message of its end, once that is decided
        exposed = spec["expose"].get("ports", [])
        self.ports = {port: port for port in exposed}  # exposed: where the Job's server listens
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.ports]
        self.urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in self.listeners] or None
        base = ["PATH", "HOME", "TMPDIR", "LANG", *os.environ.get("JOBS_API_PASS", "").split()]
        self.env = {name: os.environ[name] for name in base if name in os.environ}
        self.env |= {"HF_ENDPOINT": here.endpoint} | spec["environment"] | spec["secrets"]
        if spec["network"]:
            self.env["HF_NETWORK_GROUP_PREFIX"] = f"{spec['network']['group']}-"
        if exposed and re.search(r"\bvllm\b", " ".join(command)):
            # Bound but not listening: nobody else is given the port, and vLLM, which sets
            # SO_REUSEADDR too, can bind it.
            self.reserved = socket.socket()
            self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.reserved.bind(("127.0.0.1", 0))
            self.ports[exposed[0]] = self.reserved.getsockname()[1]
            self.env["JOB_PORT"] = str(self.ports[exposed[0]])
        self.env["JOB_ID"] = self.id  # last: the Job's processes are found by it

    def info(self) -> dict:
        """The Job as the Hub shows it; huggingface_hub._jobs_api.JobInfo is the reader."""
        end = self.times.get("finishedAt", time.time())
        ran = int(end - self.times.get("startedAt", end))
        return {
            **{k: v for k, v in self.spec.items() if v or k in ("arguments", "environment")},
            **{what: iso(seconds) for what, seconds in self.times.items()},
            "id": self.id,
            "secrets": dict.fromkeys(self.spec["secrets"], "***"),
            "retry": self.spec["attempts"] - 1,
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": self.urls},
            "durations": {"schedulingSecs": 0, "runningSecs": ran, "totalSecs": ran},
            "owner": OWNERS[self.owner],
            "initiator": OWNERS[USER],
        }

    def enter(self, stage: str, message: str | None = None) -> None:
        self.stage, self.message = stage, message
        (self.folder / "job.json").write_text(json.dumps(self.info(), indent=1) + "\n")
        logging.info("%s %s%s", self.id, stage, f": {message}" if message else "")

    def conclude(self, stage: str, message: str | None = None) -> None:
        """Decide how the Job ends, which ends its processes. The first decision counts."""
        self.outcome = self.outcome or (stage, message)

    async def run(self) -> None:
        # From SCHEDULING to a terminal stage, which is entered when no process of the Job is left.
        timeout, gateways, code = self.spec["timeoutSeconds"], [], None
        too_long = "ERROR", f"Job timeout: ran for {timeout} seconds"
        asyncio.get_running_loop().call_later(timeout, self.conclude, *too_long)
        for port, listener in zip(self.ports, self.listeners, strict=True):
            gateways.append(await serve(lambda r, port=port: self.forward(port, r), listener))
        here.watchdog.write(f"{self.id}\n")
        try:
            for _ in range(self.spec["attempts"]):
                if not self.outcome and (code := await self.attempt()) == 0:
                    self.conclude("COMPLETED")
        except OSError as error:  # no such program
            self.conclude("ERROR", f"Job failed: {error}")
        self.conclude("ERROR", f"Job failed with exit code: {code}")
        for gateway in gateways:
            await gateway.cleanup()
        self.times["finishedAt"] = time.time()
        self.enter(*self.outcome)

    async def attempt(self) -> int:
        # Runs the command until it ends or the Job has to; ends all its processes. Returns its exit
        # code.
        process = await asyncio.create_subprocess_exec(
            *self.argv, env=self.env, cwd=self.folder / "work", start_new_session=True,
            stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, limit=1 << 24,  # bytes in a line
        )  # fmt: skip
        self.times.setdefault("startedAt", time.time())
        self.enter("RUNNING")
        copying = asyncio.create_task(self.copy_to_log(process.stdout))
        while process.returncode is None and not self.outcome:
            await asyncio.sleep(POLL_S)
        # Like a container, a Job ends with its first process: what that leaves is killed at once.
        await end_processes(self.id, process.pid, here.grace if process.returncode is None else 0)
        # All writers have ended. A process that was handed the pipe and is not the Job's must not
        # keep the Job alive.
        await asyncio.wait({copying, asyncio.create_task(process.wait())}, timeout=KILL_DEADLINE_S)
        code = process.returncode or 0  # None: even SIGKILL has not ended it
        return code if code >= 0 else 128 - code  # as shells write it: 128 + signal

    async def copy_to_log(self, output: asyncio.StreamReader) -> None:
        # Each line behind the time at which it came; the CLI leaves the first one out.
        with open(self.folder / "log", "ab", buffering=0) as file:
            file.write(b"%s ===== Job started =====\n" % iso(time.time()).encode())
            async for line in output:
                file.write(b"%s %s\n" % (iso(time.time()).encode(), line.removesuffix(b"\n")))

    async def forward(self, port: int, request: web.BaseRequest) -> web.StreamResponse:
        # A request to an exposed port: passes on what the Job's server answers, as it comes.
        public = port in self.spec["expose"].get("portsPublic", [])
        allowed = public or request.headers.get("Authorization") == f"Bearer {self.token}"
        require(allowed, "Invalid or missing token", 401)
        require(self.stage not in TERMINAL, "The Job has ended", 503)
        exposed_connections.add(request.transport)
        path = request.raw_path.removeprefix(f"/exposed/{self.id}/{port}").removeprefix("/")
        url = URL(f"http://127.0.0.1:{self.ports[port]}/{path}", encoded=True)
        sent = {"headers": end_to_end(request), "allow_redirects": False}
        sent |= {"data": request.content} if request.body_exists else {}
        answer = None
        try:
            async with here.client.request(request.method, url, **sent) as reply:
                answer = web.StreamResponse(status=reply.status, headers=end_to_end(reply))
                await answer.prepare(request)
                async for piece in reply.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
        except aiohttp.ClientError:
            require(answer is not None, f"No answer from the Job's port {self.ports[port]}", 503)
            if request.transport:  # an answer cut short must not look like a whole one
                request.transport.abort()
        return answer


def end_to_end(message) -> list[tuple[str, str]]:
    """The headers of a request or an answer that a gateway passes on."""
    return [item for item in message.headers.items() if item[0].lower() not in HOP_BY_HOP]


# ---- The API -------------------------------------------------------------------------------------


async def serve(handler, listener: socket.socket) -> web.ServerRunner:
    # A client that leaves cancels its handler; at an exposed port, that leaves the Job's server.
    server = web.Server(handler, handler_cancellation=True, auto_decompress=False, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=1)  # by then the Jobs have ended
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()  # tests open 400 at once
    return runner


async def handle(request: web.BaseRequest) -> web.StreamResponse:
    path = request.path.strip("/").split("/")
    if path[0] == "exposed":
        _, job_id, port, *_ = *path, "", ""
        known = job_id in jobs and port in map(str, jobs[job_id].ports)
        require(known, "No such Job, or it does not expose this port", 404)
        return await jobs[job_id].forward(int(port), request)
    exposed_connections.discard(request.transport)
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    require(scheme == "Bearer" and token, "Invalid username or password.", 401)
    match request.method, path[1:]:
        case "GET", ["whoami-v2"]:
            user, *orgs = OWNERS.values()
            role = "read" if token.startswith("readonly") else "write"
            auth = {"type": "access_token", "accessToken": {"displayName": "any", "role": role}}
            body = user | {"fullname": USER, "orgs": orgs, "auth": auth}
        case "GET", ["jobs", "hardware"]:
            body = [hardware(name, price / 60) for name, price in PRICES.items()]
        case "GET", ["jobs", owner]:
            stages = request.query.getall("stage", ["SCHEDULING", "RUNNING", *TERMINAL])
            labels = {tuple(label.split("=", 1)) for label in request.query.getall("label", [])}
            found = [job for job in reversed(jobs.values()) if job.owner == own(owner)]
            found = [job for job in found if labels <= job.spec["labels"].items()]
            body = [job.info() for job in found if job.stage in stages]
        case "POST", ["jobs", owner]:
            body = await create_job(own(owner), token, request)
        case "GET", ["jobs", owner, job_id]:
            body = find_job(owner, job_id).info()
        case "GET", ["jobs", owner, job_id, "logs"]:
            return await stream_log(find_job(owner, job_id), request)
        case "POST", ["jobs", owner, job_id, "cancel"]:
            find_job(owner, job_id).conclude("CANCELED", "Job canceled")
            body = find_job(owner, job_id).info()
        case "GET", ["buckets", owner]:
            folders = (here.buckets / own(owner)).glob("*")
            body = [bucket_info(f"{own(owner)}/{folder.name}") for folder in folders]
        case "POST", ["buckets", owner, name] if name != "jobs-artifacts":  # for `hf`'s uploads
            folder = bucket_path(f"{own(owner)}/{name}")
            body = {"url": f"{here.endpoint}/buckets/{own(owner)}/{name}"}
            require(not folder.exists(), "You already created this bucket", 409, **body)
            folder.mkdir(parents=True)
        case "GET", ["buckets", owner, name]:
            body = bucket_info(f"{own(owner)}/{name}")
        case "GET", ["buckets", owner, name, "tree", *prefix]:
            depth = "**/*" if request.query.get("recursive") == "true" else "*"
            body = bucket_tree(f"{own(owner)}/{name}", "/".join([*prefix, depth]))
        case _:
            what = f"No {request.method} {request.path} here: uploads and downloads of files"
            require(False, f"{what} need the Xet protocol, and other calls are not known")
    return web.json_response(body)


def hardware(name: str, price: float) -> dict:
    """A flavor as `hf jobs hardware` reads it; `price` is in $ per minute."""
    size = dict.fromkeys(["cpu", "ram", "ephemeralStorage"], "this machine's")
    cost = {"unitLabel": "minute", "unitCostUSD": price, "unitCostMicroUSD": round(price * 1e6)}
    return {"name": name, "prettyName": name} | size | cost


def own(owner: str) -> str:
    """The namespace that is meant, if the user may use it."""
    require(owner in (*OWNERS, "me"), f"No access to {owner}: try {' or '.join(OWNERS)}", 403)
    return USER if owner == "me" else owner


def find_job(owner: str, job_id: str) -> Job:
    require(job_id in jobs and jobs[job_id].owner == own(owner), "Job not found", 404)
    return jobs[job_id]


async def create_job(owner: str, token: str, request: web.BaseRequest) -> dict:
    require(not token.startswith("readonly"), "The token does not have sufficient permissions", 403)
    require(not (here.state / "refuse").exists(), "No Jobs are accepted at present", 503)
    running = sum(job.stage not in TERMINAL for job in jobs.values())
    require(running < here.max_jobs, "Pre-paid credit balance is insufficient", 402)
    try:
        job = Job(owner, checked(await request.json()), token)
    except (OSError, json.JSONDecodeError) as error:  # OSError: of a mount point
        require(False, str(error))
    jobs[job.id] = job
    job.task = asyncio.create_task(job.run())
    return job.info()


async def stream_log(job: Job, request: web.BaseRequest) -> web.StreamResponse:
    # Server-sent events: the log, or its last `tail` lines, and what comes until the Job has ended.
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    # ConnectionError: the client has left.
    with suppress(ConnectionError), open(job.folder / "log", "rb") as file:
        lines, ended = file.readlines()[-int(request.query.get("tail", 0)) :], False
        while lines or not ended:
            for line in lines:
                stamp, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
                event = json.dumps({"timestamp": stamp, "data": text})
                await answer.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(0 if lines else POLL_S)
            ended = job.stage in TERMINAL  # before the last look at the log
            lines = file.readlines()
    return answer


# ---- From the start to the end -------------------------------------------------------------------


def cut_connections() -> None:
    for transport in list(exposed_connections):
        transport.abort()  # its handler is cancelled, which closes the Job's side, too


async def run(listener: socket.socket) -> int:
    # Serves until a signal, or until COMMAND's end; then ends all Jobs. Returns the exit code.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cut_connections)
    server = await serve(handle, listener)
    # Towards the Jobs' servers: as the client asked, also for how long; and no connection is used
    # twice, because a server may close it just then.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None), skip_auto_headers=["Accept", "Accept-Encoding"],
    ) as here.client:  # fmt: skip
        code = await wait_for_end()
        # The API still answers, for instance to a Job that cancels others when it is cancelled.
        while not all(job.task.done() for job in jobs.values()):
            for job in jobs.values():
                job.conclude("CANCELED", "Job canceled")
            await asyncio.sleep(POLL_S)
        await server.cleanup()
    return code


async def wait_for_end() -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if not here.command:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, stop.set)
        sys.stdout.write(f"[jobs] {here.endpoint}\n")
        sys.stdout.flush()
        await stop.wait()
        return 0
    logging.info(here.endpoint)
    # In this process group: a terminal's Ctrl-C is COMMAND's, which cleans up while the API still
    # answers. A handler, unlike SIG_IGN, is not inherited.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    command = ["setpriv", "--pdeathsig", "KILL", "--", *here.command]  # it dies with this process
    process = Popen(command, env=os.environ | {"HF_ENDPOINT": here.endpoint})
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signum, process.send_signal, signum)
    while process.poll() is None:
        await asyncio.sleep(POLL_S)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage="%(prog)s --state DIRECTORY [OPTIONS] [-- COMMAND ...]")
    option = parser.add_argument
    option("--state", type=Path, required=True, help="directory of the Jobs' logs and records")
    option("--port", type=int, default=0, help="to listen on, on 127.0.0.1 (default: a free one)")
    option("--buckets", type=Path, help="directory of the buckets (default: STATE/buckets)")
    option("--reader-buckets", type=Path, help="what read-only volumes show instead (needs root)")
    option("--max-jobs", type=int, default=sys.maxsize, help="so many Jobs at a time")
    option("--grace", type=float, default=10, help="seconds from SIGTERM to SIGKILL (default: 10)")
    option("--log", type=Path, help="file to which log lines are appended (default: stderr)")
    option("command", nargs="*", help="what to run with HF_ENDPOINT set; all Jobs end with it")
    parser.parse_args(namespace=here)
    here.buckets = (here.buckets or here.state / "buckets").resolve()
    # A connection to an exposed port takes two descriptors, and a common limit is 1024.
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    logging.basicConfig(filename=here.log, format="[jobs] %(message)s", level=logging.INFO)
    # Not what aiohttp says about a malformed request: it quotes the header, token included.
    logging.getLogger("aiohttp.server").addFilter(lambda r: "400, message" not in str(r.exc_info))
    start_watchdog()
    try:
        listener = socket.create_server(("127.0.0.1", here.port))
    except OSError as error:
        sys.stderr.write(f"[jobs] cannot listen: {error}\n")
        sys.exit(1)
    here.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    code = asyncio.run(run(listener))
    here.watchdog.close()
    os.wait()  # until the watchdog has cleaned up
    sys.exit(code)
