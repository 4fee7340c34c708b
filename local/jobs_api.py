"""Stand-in for the Hugging Face Jobs API: the real `hf` CLI talks to it, and its Jobs are processes of this machine.

    python local/jobs_api.py --state /tmp/jobs        # prints "[jobs] http://127.0.0.1:PORT", serves until a signal
    export HF_ENDPOINT=http://127.0.0.1:PORT HF_TOKEN=anything
    hf jobs run --detach --quiet python:3.12 python3 -c 'print("hello")'          # prints the Job's id
    hf jobs logs -f ID                                                            # hello

Starts in 0.2 s, costs nothing, needs Linux (/proc, pidfd) and Python 3.11. Request and answer shapes are those that
huggingface_hub 2.4.0 sends and parses (_jobs_api.py, hf_api.py, _buckets.py). As on Hugging Face: stages, timeout,
attempts, cancel, live and replayed logs, labels, the bearer token that an exposed port demands, and the death of
everything a Job started when its command ends. Different, because a Job is a process and not a container:
  1. The image is ignored: the command runs with this machine's programs, in an empty directory of its own.
  2. A bucket is a directory and a mount a symbolic link to it, so `:ro` is a promise, not enforced. With
     --reader-buckets every Job gets a mount namespace of its own: read-only volumes show that other tree (a lagging
     mirror, a FUSE mount) at the same path, and are enforced.
  3. Jobs share this machine's ports. A gateway on a free port of 127.0.0.1 stands for each exposed one; a Job that
     runs `vllm` is told in JOB_PORT which port to bind in place of the one it exposes, so that replicas can coexist.
  4. SIGTERM reaches all processes of a Job; a container's first process alone would get it.
SIGUSR1 cuts every connection through the exposed ports, as a network that fails would.
A token that starts with "readonly" may not create Jobs, and --max-jobs N stands for a credit that N Jobs use up.
When this process ends, however it ends, its Jobs end: a forked watchdog kills them. With --with-parent it ends when the
process that started it does. A Job in a network group is told HF_NETWORK_GROUP_PREFIX; its aliases resolve to nothing.
"""

import argparse
import asyncio
import collections
import ctypes
import dataclasses
import email.utils
import functools
import hmac
import http
import itertools
import json
import logging
import os
import re
import resource
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path

USER = "local"  # the one namespace there is
OWNER = {"type": "user", "id": "0" * 24, "name": USER}
DEFAULT_TIMEOUT_S = 30 * 60  # a Job's on Hugging Face
KEEP_ALIVE_S = 30  # between comments in a silent log stream; the CLI without -f gives up after 5 s of silence
REQUEST_DEADLINE_S = 30  # to receive a whole API request, or a request's head at a gateway
KILL_DEADLINE_S = 30  # for a process to disappear after SIGKILL; only one stuck in the kernel takes longer
MAX_HEAD, MAX_BODY, MAX_LINE = 64 << 10, 16 << 20, 1 << 20  # bytes
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
TERMINAL = {"COMPLETED", "CANCELED", "ERROR", "DELETED"}
FLAVORS = {  # name: (pretty name, vCPU, RAM GB, disk GB, GPUs, $ an hour)
    "cpu-basic": ("CPU Basic", 2, 16, 20, 0, 0.01),
    "h200": ("Nvidia H200", 23, 256, 3000, 1, 5.0),
    "h200x2": ("2x Nvidia H200", 46, 512, 6000, 2, 10.0),
}
log = logging.getLogger("jobs")


class ApiError(Exception):
    """Answered as the Hub does: `message` in the X-Error-Message header and in the JSON body, where the CLI looks."""

    def __init__(self, status: int, message: str, code: str | None = None, **body):
        super().__init__(message)
        self.status, self.body = status, {"error": message, **body}
        self.headers = {"X-Error-Message": " ".join(message.split()), **({"X-Error-Code": code} if code else {})}


def require(condition: object, message: str) -> None:
    """Raise the 400 that says `message` unless `condition` holds."""
    if not condition:
        raise ApiError(400, message)


def iso(seconds: float) -> str:
    """Seconds since the epoch as the Hub writes times: 2026-09-10T12:00:00.000Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- Processes: find and end all of a Job's, also when the stand-in itself is gone --------------------------------


def job_processes(job_id: str, session: int) -> set[int]:
    """Pids of a Job's living processes.

    They are those in its `session`, those that left it but inherited JOB_ID, and all descendants of either (a program
    that sets its process title overwrites the environment that /proc shows).
    """
    marker, found, parents = f"JOB_ID={job_id}".encode(), set(), {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
            # "pid (command) state ppid pgrp session ...": the command itself may hold spaces and parentheses.
            state, parent, _, its_session = stat.rpartition(b")")[2].split()[:4]
            if state in b"ZX":  # dead, and just not yet collected by its parent
                continue
            pid = int(entry.name)
            parents[pid] = int(parent)
            if int(its_session) == session or marker in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended just now, or another user's
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


async def all_exit(pidfds: list[int], timeout: float | None) -> None:
    """Wait until the processes behind `pidfds` have ended, at most `timeout` seconds. Closes the descriptors."""
    loop, ends = asyncio.get_running_loop(), []
    for fd in pidfds:
        ends.append(loop.create_future())
        loop.add_reader(fd, lambda fd=fd, end=ends[-1]: (loop.remove_reader(fd), end.set_result(None)))
    try:
        if ends:
            await asyncio.wait(ends, timeout=timeout)
    finally:
        for fd in pidfds:
            loop.remove_reader(fd)
            os.close(fd)


async def end_processes(job_id: str, session: int, grace: float) -> None:
    """SIGTERM a Job's processes, SIGKILL those left after `grace` seconds (0: at once); return when none is left.

    Raises TimeoutError if one outlives SIGKILL by KILL_DEADLINE_S.
    """
    loop = asyncio.get_running_loop()
    kill_at = loop.time() + grace
    while pids := job_processes(job_id, session):
        killing = loop.time() >= kill_at
        deadline = kill_at + KILL_DEADLINE_S if killing else kill_at
        if loop.time() >= deadline:
            raise TimeoutError(f"processes {sorted(pids)} survive SIGKILL")
        pidfds = []
        for pid in pids:
            try:
                pidfds.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(pidfds[-1], signal.SIGKILL if killing else signal.SIGTERM)
            except ProcessLookupError:
                continue  # ended between the look and the signal
        await all_exit(pidfds, deadline - loop.time())


class Watchdog:
    """A forked process that reads notes from a pipe and, at its end, cleans up what this process left behind.

    The pipe ends when this process does, SIGKILL included. The watchdog then kills the Jobs still noted and removes
    the mount points that were made. It is forked before anything else, so it holds none of this process's sockets.
    """

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write_end)
            os.setsid()  # a signal to the stand-in's process group is not for the watchdog
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            try:
                self._watch(read_end)
            except Exception:  # whatever it is, the child must end here and not run on as a second stand-in
                log.exception("the watchdog failed")
                os._exit(1)
            os._exit(0)
        os.close(read_end)
        self._notes = os.fdopen(write_end, "w", buffering=1)

    def note(self, *words: object) -> None:
        self._notes.write(json.dumps(words) + "\n")

    def finish(self) -> None:
        """Close the pipe and wait until the watchdog has cleaned up."""
        self._notes.close()
        os.waitpid(self.pid, 0)

    @staticmethod
    def _watch(read_end: int) -> None:
        jobs: dict[str, int] = {}
        mount_points: list[str] = []
        with os.fdopen(read_end) as notes:
            for line in notes:
                match json.loads(line):
                    case ["started", job_id, session]:
                        jobs[job_id] = session
                    case ["ended", job_id]:
                        jobs.pop(job_id, None)
                    case ["made", path]:
                        mount_points.append(path)
        for job_id, session in jobs.items():
            asyncio.run(end_processes(job_id, session, grace=0))
        for path in mount_points:
            try:
                os.unlink(path) if os.path.islink(path) else os.rmdir(path)
            except OSError as error:
                log.warning("mount point left behind: %s", error)


# ---- Buckets: directories, and how a Job sees them -----------------------------------------------------------------


class Buckets:
    """Bucket `user/name` is the directory `<root>/user/name`; read-only volumes show it from `readers` when given."""

    # Bind mounts are visible to one Job alone: the arguments are SOURCE TARGET OPTIONS triples, "--", the command.
    BIND = 'while [ "$1" != -- ]; do mount -o "$3" "$1" "$2" || exit 125; shift 3; done; shift; exec "$@"'

    def __init__(self, root: Path, readers: Path | None, watchdog: Watchdog):
        self.root, self.readers, self.watchdog = root, readers, watchdog
        self.namespace: list[str] = []
        root.mkdir(parents=True, exist_ok=True)
        if readers:
            self.namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
            try:
                trial = [*self.namespace, "mount", "-o", "bind", str(root), str(root)]
                subprocess.run(trial, check=True, capture_output=True, text=True, timeout=30)
            except (OSError, subprocess.SubprocessError) as error:
                reason = (getattr(error, "stderr", None) or str(error)).strip()
                raise SystemExit(f"[jobs] --reader-buckets needs mount namespaces (root, or unshare -r): {reason}")

    def path(self, bucket: str) -> Path:
        """Directory of bucket `user/name`; 400 for an id that is none."""
        require(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", bucket), f"Invalid bucket id: {bucket}")
        return self.root / bucket

    def info(self, bucket: str) -> dict:
        """The bucket as the Hub shows it; 404 when it is not there."""
        if not (path := self.path(bucket)).is_dir():
            raise ApiError(404, f"Bucket {bucket} not found", code="RepoNotFound")
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        created = iso(path.stat().st_ctime)
        return {"id": bucket, "private": True, "createdAt": created, "size": sum(sizes), "totalFiles": len(sizes)}

    def tree(self, bucket: str, prefix: str, recursive: bool) -> list[dict]:
        """The files and folders under `prefix` of a bucket."""
        root, items = self.path(bucket), []
        require(".." not in Path(prefix).parts, f"Invalid path: {prefix}")
        for path in sorted((root / prefix).glob("**/*" if recursive else "*")):
            item = {"path": str(path.relative_to(root)), "uploadedAt": iso(path.stat().st_mtime)}
            file = {"type": "file", "size": path.stat().st_size, "xetHash": ""}
            items.append({**item, **({"type": "directory"} if path.is_dir() else file)})
        return items

    def command(self, volumes: list[dict], command: list[str]) -> list[str]:
        """Make the mount points of a Job's `volumes`; return its `command` inside whatever shows them to it."""
        binds: list[str] = []
        for volume in volumes:
            require(volume["type"] == "bucket", f"Only bucket volumes can be mounted here, not a {volume['type']}")
            bucket, target, path = volume["source"], volume["mountPath"], volume.get("path", "").strip("/")
            where = f"volume {bucket}:{target}"
            valid = target.startswith("/") and ".." not in Path(target).parts + Path(path).parts
            require(valid, f"{where}: not an absolute mount path, or a '..' in it")
            require((self.path(bucket) / path).is_dir(), f"{where}: no bucket {bucket}, or no folder '{path}' in it")
            source = (self.readers if self.readers and volume.get("readOnly") else self.root) / bucket / path
            try:
                self._make_mount_point(source, Path(target), where)
            except OSError as error:
                raise ApiError(400, f"{where}: {error}")
            binds += [str(source), target, "bind,ro" if volume.get("readOnly") else "bind"]
        return [*self.namespace, "sh", "-c", self.BIND, "sh", *binds, "--", *command] if self.readers else command

    def _make_mount_point(self, source: Path, target: Path, where: str) -> None:
        source.mkdir(parents=True, exist_ok=True)  # only --reader-buckets can lack it: its copy is still to come
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and self.readers:
            require(target.is_dir() and not target.is_symlink(), f"{where}: {target} exists and is no directory")
        elif os.path.lexists(target):
            same = target.is_symlink() and target.resolve() == source.resolve()
            require(same, f"{where}: {target} exists and is no link to {source}")
        else:
            target.mkdir() if self.readers else target.symlink_to(source)
            self.watchdog.note("made", str(target))


# ---- A Job ---------------------------------------------------------------------------------------------------------


FIELDS = {"command": list, "arguments": list, "environment": dict, "secrets": dict, "labels": dict, "flavor": str}
FIELDS |= {"timeoutSeconds": int, "attempts": int, "volumes": list, "expose": dict, "network": dict}


def check_spec(spec: object) -> None:
    """Raise the 400 that says what is wrong with the payload of a new Job."""
    require(isinstance(spec, dict), "A Job is a JSON object")
    for field, kind in FIELDS.items():
        require(isinstance(spec.get(field, kind()), kind), f"{field} must be a {kind.__name__}")
    for field in ("environment", "secrets", "labels"):
        require(all(isinstance(v, str) for v in spec.get(field, {}).values()), f"{field} must map strings to strings")
    for field in ("timeoutSeconds", "attempts"):
        require(spec.get(field, 1) > 0, f"{field} must be positive")
    require(spec.get("dockerImage") or spec.get("spaceId"), "dockerImage or spaceId is required")
    command = [*spec.get("command", []), *spec.get("arguments", [])]
    require(command and all(isinstance(word, str) for word in command), "command must be a list of strings")
    require(spec.get("flavor") in FLAVORS, f"Invalid flavor {spec.get('flavor')}: expected one of {', '.join(FLAVORS)}")
    for key, value in spec.get("labels", {}).items():  # the rule is in HfApi.update_job_labels; names may have dots
        allowed = r"[\w.-]{0,100}" if key == "name" else r"[\w-]{0,100}"
        valid = re.fullmatch(r"[\w-]{1,100}", key, re.ASCII) and re.fullmatch(allowed, value, re.ASCII)
        require(valid, f"Invalid label {key}={value}: at most 100 letters, digits, dashes and underscores")
    for volume in spec.get("volumes", []):
        valid = isinstance(volume, dict) and all(
            isinstance(volume.get(f), str) for f in ("type", "source", "mountPath")
        )
        require(valid, f"Invalid volume: {volume}")
    targets = [volume["mountPath"] for volume in spec.get("volumes", [])]
    require(len(set(targets)) == len(targets), "Two volumes have the same mountPath")
    ports = spec.get("expose", {}).get("ports", [])
    require(all(isinstance(port, int) and 0 < port < 65536 for port in ports), f"Invalid ports to expose: {ports}")


class Job:
    """One Job: its record, its log, its processes and the gateways of its exposed ports.

    `spec` is the checked payload, `argv` what is executed, `token` what the gateways demand. Secrets and token stay in
    memory: neither the record nor any file holds them.
    """

    def __init__(self, spec: dict, argv: list[str], token: str, folder: Path, endpoint: str, grace: float):
        self.id = secrets.token_hex(12)
        self.spec, self.argv, self.token, self.grace = spec, argv, token, grace
        self.folder, self.log_path = folder / self.id, folder / self.id / "log"
        (self.folder / "work").mkdir(parents=True)
        self.log_path.touch()
        self.stage, self.message = "SCHEDULING", None
        self.created_at, self.started_at, self.finished_at = time.time(), None, None
        self.canceled = asyncio.Event()
        self.changed = asyncio.Event()  # set, and replaced by a new one, when the log or the stage has news
        base = ["PATH", "HOME", "TMPDIR", "LANG", *os.environ.get("JOBS_API_PASS", "").split()]
        self.env = {name: os.environ[name] for name in base if name in os.environ}
        self.env |= {"HF_ENDPOINT": endpoint, **spec.get("environment", {}), **spec.get("secrets", {})}
        if network := spec.get("network"):
            self.env["HF_NETWORK_GROUP_PREFIX"] = f"{network['group']}-"  # where an alias begins, whatever it is there
        self.env["JOB_ID"] = self.id  # last: the Job's processes are found by it
        self.ports = list(spec.get("expose", {}).get("ports", []))  # each has a listener at the same index
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in self.ports]
        self.urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in self.listeners]
        self.connections: set[asyncio.StreamWriter] = set()  # of the gateways, to their clients
        self.reserved = socket.socket()
        if self.ports and spec["command"][0] == "vllm":
            # Bound but not listening: nobody else is given it, and vLLM, which sets SO_REUSEADDR too, can take it.
            self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.reserved.bind(("127.0.0.1", 0))
            self.ports[0] = self.reserved.getsockname()[1]
            self.env["JOB_PORT"] = str(self.ports[0])

    def info(self) -> dict:
        """The Job as the Hub shows it; huggingface_hub._jobs_api.JobInfo is the reader."""
        end = self.finished_at or time.time()
        started = self.started_at
        echoed = ("dockerImage", "spaceId", "command", "flavor", "labels", "volumes", "expose", "network")
        return {
            "id": self.id,
            "createdAt": iso(self.created_at),
            "startedAt": started and iso(started),
            "finishedAt": self.finished_at and iso(self.finished_at),
            **{field: self.spec[field] for field in echoed if field in self.spec},
            "arguments": self.spec.get("arguments", []),
            "environment": self.spec.get("environment", {}),
            "secrets": dict.fromkeys(self.spec.get("secrets", {}), "***"),
            "timeoutSeconds": self.spec.get("timeoutSeconds", DEFAULT_TIMEOUT_S),
            "retry": self.spec.get("attempts", 1) - 1,
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": self.urls or None},
            "durations": {
                "schedulingSecs": int(started - self.created_at) if started else None,
                "runningSecs": int(end - started) if started else None,
                "totalSecs": int(end - self.created_at),
            },
            "owner": OWNER,
            "initiator": OWNER,
        }

    def news(self) -> None:
        """Wake whoever waits for the log or the stage to go on."""
        self.changed.set()
        self.changed = asyncio.Event()

    def enter(self, stage: str, message: str | None = None) -> None:
        self.stage, self.message = stage, message
        (self.folder / "job.json").write_text(json.dumps(self.info(), indent=1) + "\n")
        self.news()

    def write_log(self, lines: list[bytes]) -> None:
        """Append whole lines, each behind the time it arrived."""
        stamp = iso(time.time()).encode()
        with open(self.log_path, "ab") as file:
            file.write(b"".join(b"%s %s\n" % (stamp, line) for line in lines))
        self.news()

    async def run(self, watchdog: Watchdog) -> None:
        """From SCHEDULING to a terminal stage, which is entered only when no process of the Job is left."""
        servers, expose = [], self.spec.get("expose", {})
        stage, message = "ERROR", "The Jobs API stand-in failed: see its log"
        try:
            for exposed, port, listener in zip(expose.get("ports", []), self.ports, self.listeners, strict=True):
                gateway = functools.partial(self.gateway, port, exposed in expose.get("portsPublic", []))
                servers.append(await asyncio.start_server(gateway, sock=listener, limit=MAX_HEAD))
            stage, message = await self._run_attempts(watchdog)
        except OSError as error:  # no such program, or a process that SIGKILL does not end (TimeoutError)
            message = f"Job failed: {error}"
            self.write_log([message.encode()])
        finally:
            for server in servers:
                server.close()
            self.reserved.close()
            self.finished_at = time.time()
            self.enter(stage, message)
            ran = self.finished_at - (self.started_at or self.finished_at)
            log.info("%s %s after %.1f s%s", self.id, stage, ran, f": {message}" if message else "")

    async def _run_attempts(self, watchdog: Watchdog) -> tuple[str, str | None]:
        """Run the command, again while it fails and attempts are left. Returns the final stage and message."""
        attempts, loop = self.spec.get("attempts", 1), asyncio.get_running_loop()
        words = " ".join(shlex.join(self.spec["command"]).split())[:120]
        deadline = loop.time() + self.spec.get("timeoutSeconds", DEFAULT_TIMEOUT_S)
        for attempt in range(1, attempts + 1):
            if self.canceled.is_set():
                return "CANCELED", "Job canceled"
            self.write_log([f"===== Job started at {iso(time.time())} =====".encode()])  # the CLI leaves this line out
            nth = f" (attempt {attempt} of {attempts})" if attempts > 1 else ""
            log.info("%s started%s: %s %s", self.id, nth, self.spec["flavor"], words)
            stage, message = await self._attempt(watchdog, deadline)
            if stage != "ERROR" or loop.time() >= deadline:
                break
        return stage, message

    async def _attempt(self, watchdog: Watchdog, deadline: float) -> tuple[str, str | None]:
        """Run the command to its end, a cancel or the deadline, end all its processes, and say how it went."""
        loop = asyncio.get_running_loop()
        watchdog.note("started", self.id, -1)  # should this process die now, JOB_ID tells whom it started
        process = subprocess.Popen(  # noqa: ASYNC220 - returns once the program is loaded
            self.argv,
            env=self.env,
            cwd=self.folder / "work",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        collector = asyncio.create_task(self._collect(process))
        end = asyncio.create_task(all_exit([os.pidfd_open(process.pid)], None))
        cancel = asyncio.create_task(self.canceled.wait())
        grace = 0  # like a container, a Job ends with its first process: what that leaves behind is killed at once
        try:
            watchdog.note("started", self.id, process.pid)
            self.started_at = self.started_at or time.time()
            self.enter("RUNNING")
            await asyncio.wait({end, cancel}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            grace = 0 if end.done() else self.grace
        finally:
            ended_by_itself = end.done()
            await end_processes(self.id, process.pid, grace)
            watchdog.note("ended", self.id)
            # All writers are gone, so the output ends; a stranger that was handed the pipe must not keep the Job alive.
            await asyncio.wait({collector}, timeout=KILL_DEADLINE_S)
            for task in (collector, end, cancel):
                task.cancel()
        code = process.wait()  # at once: it is among the ended
        if not ended_by_itself and self.canceled.is_set():
            return "CANCELED", "Job canceled"
        if not ended_by_itself:
            return "ERROR", f"Job timeout: ran for {self.spec.get('timeoutSeconds', DEFAULT_TIMEOUT_S)} seconds"
        if code:
            return "ERROR", f"Job failed with exit code: {code if code > 0 else 128 - code}"  # 128 + signal
        return "COMPLETED", None

    async def _collect(self, process: subprocess.Popen) -> None:
        """Copy the command's output to the log, line by line, until every writer has closed it."""
        reader, rest = asyncio.StreamReader(), b""
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        try:
            while chunk := await reader.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE:
                    lines, rest = [*lines, rest], b""
                self.write_log(lines)
        finally:
            self.write_log([rest] if rest else [])
            transport.close()

    async def gateway(
        self, port: int, public: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection to an exposed port: check the first request's token, then pass bytes both ways untouched."""
        upstream, pumps = None, []
        self.connections.add(writer)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_DEADLINE_S)
            given = re.search(rb"\r\nauthorization:[ \t]*([^\r\n]*?)[ \t]*\r\n", head, re.IGNORECASE)
            if not public and not hmac.compare_digest(given[1] if given else b"", f"Bearer {self.token}".encode()):
                writer.write(response(401, {"error": "Invalid or missing token"}))
                return
            try:
                from_job, upstream = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.write(response(503, {"error": f"Nothing listens on the Job's port {port}"}))
                return
            upstream.write(head)
            pumps = [asyncio.create_task(pump(reader, upstream)), asyncio.create_task(pump(from_job, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (EOFError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # no whole request came, or the client left: nobody is there to be answered
        finally:
            self.connections.discard(writer)
            for task in pumps:
                task.cancel()
            for end in (writer, upstream):
                if end:
                    end.close()  # what is still buffered is sent first


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side is gone."""
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass  # a reset is an end like any other; the caller closes both sides


# ---- HTTP ----------------------------------------------------------------------------------------------------------


def response(status: int, body: object, headers: dict[str, str] | None = None) -> bytes:
    """A whole HTTP answer with a JSON body, after which the connection closes."""
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", f"Date: {email.utils.formatdate(usegmt=True)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + content


@dataclasses.dataclass
class Request:
    """An API request: `path` in segments, `query` as lists of values, `token` maybe empty, `body` the JSON or None."""

    method: str
    path: list[str]
    query: dict[str, list[str]]
    token: str
    body: object


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises ApiError for a request that is not to be answered, EOFError or ConnectionError when none came."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *fields = head.rstrip().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        length = int(headers.get("content-length", 0))
        require(length <= MAX_BODY, f"The request is larger than {MAX_BODY} bytes")
        content = await reader.readexactly(length)
        body = json.loads(content) if content else None
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise ApiError(400, f"Invalid request: {error}")
    bearer = re.fullmatch(r"Bearer +(\S+)", headers.get("authorization", ""))
    path, _, query = target.partition("?")
    segments = [urllib.parse.unquote(segment) for segment in path.strip("/").split("/")]
    return Request(method, segments, urllib.parse.parse_qs(query), bearer[1] if bearer else "", body)


class Api:
    """The HTTP server: routes, and the Jobs they speak of."""

    def __init__(self, args: argparse.Namespace, buckets: Buckets, watchdog: Watchdog):
        self.args, self.buckets, self.watchdog = args, buckets, watchdog
        self.endpoint, self.stopping = "", False  # the endpoint is known when it listens
        self.jobs: dict[str, Job] = {}
        self.tasks: set[asyncio.Task] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer."""
        what = "request"
        try:
            request = await asyncio.wait_for(read_request(reader), REQUEST_DEADLINE_S)
            what = f"{request.method} /{'/'.join(request.path)}"
            await self.answer(request, writer)
        except ApiError as error:
            log.info("%s refused: %d %s", what, error.status, error)
            writer.write(response(error.status, error.body, error.headers))
        except (EOFError, TimeoutError, ConnectionError):
            pass  # no whole request came, or the client left: nobody is there to be answered
        finally:
            writer.close()

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Dispatch by route; `me` is the user's own namespace in bucket routes."""
        if request.path == ["api", "agent-harnesses"]:  # asked, without a token, whenever `hf` starts; optional
            writer.write(response(404, {"error": "Not Found"}))
            return
        if not request.token:
            raise ApiError(401, "Invalid username or password.")
        match request.method, request.path:
            case "GET", ["api", "whoami-v2"]:
                role = "read" if request.token.startswith("readonly") else "write"
                auth = {"type": "access_token", "accessToken": {"displayName": "stand-in", "role": role}}
                body = {**OWNER, "fullname": USER, "isPro": True, "canPay": True, "orgs": [], "auth": auth}
            case "GET", ["api", "jobs", "hardware"]:
                body = [hardware(name) for name in FLAVORS]
            case "GET", ["api", "jobs", user]:
                body = self.list_jobs(own(user), request.query)
            case "POST", ["api", "jobs", user]:
                body = self.create_job(own(user), request)
            case "GET", ["api", "jobs", user, job_id]:
                body = self.job(user, job_id).info()
            case "POST", ["api", "jobs", user, job_id, "cancel"]:
                job = self.job(user, job_id)
                job.canceled.set()  # its task does the rest; nothing happens to a Job that has ended
                body = job.info()
            case "GET", ["api", "jobs", user, job_id, "logs"]:
                tail = request.query.get("tail", ["0"])[0]
                require(tail.isdecimal(), f"Invalid tail: {tail}")
                await stream_log(self.job(user, job_id), int(tail), writer)
                return
            case "GET", ["api", "buckets", user]:
                body = [self.buckets.info(f"{USER}/{path.name}") for path in (self.buckets.root / own(user)).glob("*")]
            case "POST", ["api", "buckets", user, name] if (
                name != "jobs-artifacts"
            ):  # where the CLI uploads directories
                body = {"url": f"{self.endpoint}/buckets/{own(user)}/{name}"}
                if (path := self.buckets.path(f"{own(user)}/{name}")).is_dir():
                    raise ApiError(409, "You already created this bucket", **body)
                path.mkdir(parents=True)
            case "GET", ["api", "buckets", user, name]:
                body = self.buckets.info(f"{own(user)}/{name}")
            case "GET", ["api", "buckets", user, name, "tree", *prefix]:
                recursive = request.query.get("recursive", [""])[0].lower() == "true"
                body = self.buckets.tree(f"{own(user)}/{name}", "/".join(prefix), recursive)
            case _, ["api", "buckets", _, _, *_]:
                message = "Uploads and downloads need the Xet protocol, which local/jobs_api.py does not speak: "
                raise ApiError(400, message + "put the files into a bucket's directory and mount that bucket")
            case _:
                raise ApiError(501, f"local/jobs_api.py has no {request.method} /{'/'.join(request.path)}")
        writer.write(response(200, body))

    def job(self, user: str, job_id: str) -> Job:
        if job_id not in self.jobs or user != USER:
            raise ApiError(404, "Job not found")
        return self.jobs[job_id]

    def list_jobs(self, user: str, query: dict[str, list[str]]) -> list[dict]:
        """Newest first: the Jobs in one of the stages (all without `stage`) that bear every `label` (key=value)."""
        wanted = dict(label.partition("=")[::2] for label in query.get("label", []))
        return [
            job.info()
            for job in reversed(self.jobs.values())
            if ("stage" not in query or job.stage in query["stage"])
            and wanted.items() <= job.spec.get("labels", {}).items()
        ]

    def create_job(self, user: str, request: Request) -> dict:
        if request.token.startswith("readonly"):
            message = (
                "This authentication method does not have sufficient permissions to create Jobs on behalf of user "
            )
            raise ApiError(403, message + user)
        if self.stopping:
            raise ApiError(503, "The Jobs API stand-in is ending")
        check_spec(request.body)
        running = sum(job.stage not in TERMINAL for job in self.jobs.values())
        if self.args.max_jobs is not None and running >= self.args.max_jobs:
            raise ApiError(402, "Pre-paid credit balance is insufficient - add more credits to your account")
        command = [*request.body["command"], *request.body.get("arguments", [])]
        argv = self.buckets.command(request.body.get("volumes", []), command)
        job = Job(request.body, argv, request.token, self.args.state / "jobs", self.endpoint, self.args.grace)
        self.jobs[job.id] = job
        self.tasks.add(task := asyncio.create_task(job.run(self.watchdog)))
        task.add_done_callback(self.tasks.discard)
        return job.info()

    def cut_connections(self) -> None:
        for writer in [writer for job in self.jobs.values() for writer in job.connections]:
            writer.transport.abort()  # each gateway notices, and closes its other side

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, then cancel the Jobs and wait for their end."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self.cut_connections)
        try:
            server = await asyncio.start_server(self.connection, "127.0.0.1", self.args.port, limit=MAX_HEAD)
        except OSError as error:
            raise SystemExit(f"[jobs] cannot listen: {error}")
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sys.stdout.write(f"[jobs] {self.endpoint}\n")
        sys.stdout.flush()
        await stop.wait()
        self.stopping = True
        for job in self.jobs.values():
            job.canceled.set()
        if self.tasks:
            await asyncio.wait(self.tasks)  # bounded: by each Job's grace and KILL_DEADLINE_S
        server.close()


def own(user: str) -> str:
    """The namespace `user` stands for; 403 unless it is the one there is."""
    if user not in (USER, "me"):
        raise ApiError(403, f"You do not have access to the namespace {user}: here it is {USER}")
    return USER


def hardware(name: str) -> dict:
    """A flavor as `hf jobs hardware` reads it: the price is per minute."""
    pretty, cpus, ram, disk, gpus, dollars = FLAVORS[name]
    gpu = {"type": "gpu", "model": "H200", "quantity": str(gpus), "vram": f"{141 * gpus} GB", "manufacturer": "Nvidia"}
    return {
        "name": name,
        "prettyName": pretty,
        "cpu": f"{cpus} vCPU",
        "ram": f"{ram} GB",
        "ephemeralStorage": f"{disk} GB",
        "accelerator": gpu if gpus else None,
        "unitCostMicroUSD": round(dollars / 60 * 1e6),
        "unitCostUSD": round(dollars / 60, 6),
        "unitLabel": "minute",
    }


async def stream_log(job: Job, tail: int, writer: asyncio.StreamWriter) -> None:
    """Server-sent events: the log from its beginning, or its last `tail` lines, and on until the Job has ended."""
    start = f"HTTP/1.1 200 OK\r\nDate: {email.utils.formatdate(usegmt=True)}\r\nContent-Type: text/event-stream\r\n"
    writer.write(f"{start}Cache-Control: no-cache\r\nConnection: close\r\n\r\n".encode())
    with open(job.log_path, "rb") as file:  # noqa: ASYNC230 - a local file
        backlog = collections.deque(file, maxlen=tail or None)
        while True:
            ended, changed = job.stage in TERMINAL, job.changed  # before reading on, so that nothing is missed
            for line in itertools.chain(backlog, file):
                stamp, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
                writer.write(f"data: {json.dumps({'timestamp': stamp, 'data': text})}\n\n".encode())
                await writer.drain()
            if ended:
                return
            backlog = []
            try:
                await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                writer.write(b": keep-alive\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--state", type=Path, required=True, help="directory for logs and records of Jobs")
    parser.add_argument("--port", type=int, default=0, help="to listen on, on 127.0.0.1 (default: a free one)")
    parser.add_argument("--buckets", type=Path, help="directory of the buckets, USER/NAME/... (default: STATE/buckets)")
    parser.add_argument("--reader-buckets", type=Path, help="what read-only volumes show instead (needs root)")
    parser.add_argument("--max-jobs", type=int, help="refuse Jobs beyond so many at a time (default: no limit)")
    parser.add_argument("--with-parent", action="store_true", help="end when the parent process has ended")
    parser.add_argument("--grace", type=float, default=10, help="seconds from SIGTERM to SIGKILL (default: 10)")
    args = parser.parse_args()
    if args.with_parent:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before that was set
            return
    # A connection through a gateway takes two descriptors, and a common limit is 1024.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(format="[jobs] %(message)s", level=logging.INFO)
    args.state = args.state.resolve()
    watchdog = Watchdog()
    readers = args.reader_buckets and args.reader_buckets.resolve()
    buckets = Buckets((args.buckets or args.state / "buckets").resolve(), readers, watchdog)
    asyncio.run(Api(args, buckets, watchdog).run())
    watchdog.finish()


if __name__ == "__main__":
    main()
