"""S3-compatible buckets, mounted: which mount, with which flags, carries the recipe?

    python bench/bucket.py             # the table of mounts, about 8 minutes
    python bench/bucket.py --refused   # saves while the bucket takes no writes, about 11 minutes
    python bench/bucket.py --hold W R --tool s3fs
                                       # to write at W and read at R, until EOF or SIGTERM

Needs Linux with /dev/fuse, `apt-get install rclone s3fs fuse3`, `pip install 'moto[server]==5.2.5'`
and the trainer's packages; no account, no network, no GPU. The mounts are the real programs; the
bucket is moto's S3 server, which holds it in memory and is made to take --latency-ms for each
request, because most of what goes wrong is a race against it.

Per row: TRL's own save_lora_adapter saves a rank-1 adapter --saves times through a writer mount,
old ones are removed with rmtree as TRL does; a torch.distributed checkpoint is saved and a JSON
file replaced (os.replace). A reader mount is asked for each file from before the save on, as by a
replica that is told too early. Then a third, fresh mount loads all of it; and a last adapter is
saved and the writer unmounted at once. You should see the two rows "robust" work."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from chaos import say

MOTO = "moto[server]==5.2.5"
MOUNT_DEADLINE_S, END_DEADLINE_S = 120, 60  # for a server or a mount to appear, a process to end
VISIBLE_DEADLINE_S = 20  # "not seen": four times what the slowest working mount needs
LOOK_S = 0.05  # between two looks at the reader; the proxy offers an adapter every 0.5 s
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORGET_S = 2  # after which a robust reader asks the bucket again: twice the longest of its caches
KEPT = 6  # adapters that stay on the bucket, as with TRL's max_staleness=4
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Flags of a writer and a reader mount, without those that say where the bucket is."""

    tool: str
    name: str
    writer: tuple[str, ...]
    reader: tuple[str, ...]
    why: str


# A hung server must end in an error, not hold the trainer for hours: rclone waits 2 x timeout x
# (retries + 1) for each call, s3fs timeout x (retries + 1); their own defaults make that 110 and 12
# minutes.
RCLONE_GIVE_UP = ("--contimeout=10s", "--timeout=15s", "--low-level-retries=2")
S3FS_GIVE_UP = ("-oconnect_timeout=10", "-oreadwrite_timeout=10", "-oretries=2")
# safetensors 0.8 truncates the file it writes, which takes a cache. Until a renamed directory is
# uploaded, rclone 1.60 answers a read of it on the writer with EIO in this mode, and with an empty
# file in mode "full": not that one.
CACHED = "--vfs-cache-mode=writes"
ROBUST = {
    "rclone": Setting(
        "rclone",
        "robust",
        # A save that outlasts write-back is renamed while its files upload, and loses them. TRL's
        # took 0.2 s here, 1 s beside six busy processes on two cores.
        (CACHED, "--vfs-write-back=3s", *RCLONE_GIVE_UP),
        ("--read-only", "--dir-cache-time=1s", *RCLONE_GIVE_UP),
        "uploads begin 3 s after a file's last use, when the rename is done; "
        "the reader lists again each second",
    ),
    "s3fs": Setting(
        "s3fs",
        "robust",
        # One writer: what it has not made is not there. Without asking for that, a save takes half
        # the time.
        ("-onotsup_compat_dir", "-oenable_noobj_cache", *S3FS_GIVE_UP),
        # and no enable_noobj_cache: a replica asks too early
        ("-oro", "-ostat_cache_expire=1", *S3FS_GIVE_UP),
        "a close uploads, a rename copies file by file; "
        "the reader remembers for 1 s what is there, never what is not",
    ),
}
SETTINGS = (
    Setting("rclone", "defaults", (), (),
            "no cache: a file being written cannot be truncated, safetensors does"),
    Setting("rclone", "write-back 0", (CACHED, "--vfs-write-back=0s"), ROBUST["rclone"].reader,
            "the rename overtakes the uploads: a file stays under the temporary name"),
    Setting("rclone", "reader's defaults", ROBUST["rclone"].writer, ("--read-only",),
            "the reader lists a directory again after 5 minutes"),
    ROBUST["rclone"],
    Setting("s3fs", "defaults", (), ("-oro",),
            "a save asks twice as many questions; "
            "a size that the reader was asked for stays for 15 minutes"),
    Setting("s3fs", "negative cache", (), ("-oro", "-oenable_noobj_cache"),
            "a path that was asked for too early stays missing, by the manual for 15 minutes"),
    ROBUST["s3fs"],
)  # fmt: skip
NOT_MEASURED = (
    "| hf-mount | as the Job sets it | yes; not measured here | - | - | - | - | - | "
    "a file is on the Hub about 2.5 s after its close, a directory is listed again after 10 s |",
    "| mountpoint-s3 | any | no; not measured here | - | - | - | - | - | "
    "it cannot rename directories: TRL's save fails |",
)


def missing(tools: tuple[str, ...]) -> list[str]:
    """What this machine lacks to mount with `tools`, each with how to get it."""
    lacks = (
        []
        if Path("/dev/fuse").exists()
        else ["/dev/fuse (docker run --device /dev/fuse --cap-add SYS_ADMIN)"]
    )
    packages = {tool: tool for tool in tools} | {"fusermount3": "fuse3"}
    lacks += [
        f"{name} (apt-get install {packages[name]})" for name in packages if not shutil.which(name)
    ]
    if not all(importlib.util.find_spec(module) for module in ("moto", "boto3", "flask")):
        lacks.append(f"moto (pip install '{MOTO}')")
    return lacks


# -------------------------------------------------------------------------------- server and mounts
@dataclasses.dataclass
class Bucket:
    url: str
    name: str
    server: subprocess.Popen
    key, secret = "bench", "bench-secret"  # moto takes any

    def client(self):
        import boto3  # not at the top: missing() must be able to say that it is
        from botocore.config import Config

        once = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, read_timeout=30)
        keys = {
            "aws_access_key_id": self.key,
            "aws_secret_access_key": self.secret,
            "region_name": "us-east-1",
        }
        return boto3.client("s3", endpoint_url=self.url, config=once, **keys)

    def files(self) -> dict[str, bytes]:
        """Every object's key and content, without s3fs's markers of directories."""
        client, found = self.client(), {}
        for key in (
            item["Key"] for item in client.list_objects_v2(Bucket=self.name).get("Contents", [])
        ):
            if not key.endswith("/"):
                # deleted or renamed since it was listed
                with contextlib.suppress(client.exceptions.NoSuchKey):
                    found[key] = client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return found

    def refuse_writes(self) -> None:
        objects = f"arn:aws:s3:::{self.name}/*"
        deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": objects}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
        self.client().put_bucket_policy(Bucket=self.name, Policy=policy)

    def allow_writes(self) -> None:
        self.client().delete_bucket_policy(Bucket=self.name)


def serve(latency_s: float) -> None:
    """The server's process: print the port, serve until stdin closes, which it does however the
    parent ends."""
    import logging

    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")

    def far_away(environ, start_response):
        time.sleep(latency_s)  # the network that is not there
        return app(environ, start_response)

    server = make_server(
        "127.0.0.1", 0, far_away, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(server.server_port)
    sys.stdin.read()


@contextlib.contextmanager
def s3_server(latency_s: float = 0.0):
    """Start an S3 server with one empty bucket; yields the Bucket."""
    command = [sys.executable, __file__, "--serve", "--latency-ms", str(latency_s * 1000)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        ready, _, _ = select.select([server.stdout], [], [], MOUNT_DEADLINE_S)
        port = server.stdout.readline().strip() if ready else ""
        if not port:
            raise RuntimeError(
                f"moto's server: expected its port within {MOUNT_DEADLINE_S} s, found none: stderr"
            )
        bucket = Bucket(f"http://127.0.0.1:{port}", "lora", server)
        bucket.client().create_bucket(Bucket=bucket.name)
        yield bucket
    finally:
        server.kill()  # it keeps nothing; SIGKILL also ends it while stopped
        server.wait(END_DEADLINE_S)
        server.stdin.close()
        server.stdout.close()


@contextlib.contextmanager
def mount(
    tool: str, bucket: Bucket, path: str | Path, role: str, flags: tuple[str, ...] | None = None
):
    """Mount `bucket` at `path` with the robust flags of `role` ("writer" or "reader") or `flags`;
    yields the process.

    Leaving does not wait for uploads, as an unmount does not: rclone ends at once and drops what it
    has not uploaded with its cache. Wait for what you wrote to be in `bucket.files()` first. Raises
    RuntimeError if it does not mount."""
    path = Path(path)
    flags = getattr(ROBUST[tool], role) if flags is None else flags
    path.mkdir(parents=True, exist_ok=True)
    if path.is_mount():
        raise RuntimeError(
            f"{path}: expected an empty directory, found a mount: run fusermount3 -u {path}"
        )
    # Not the user's AWS_*: they belong to another bucket, and AWS_CA_BUNDLE stops rclone 1.60. Keys
    # are not arguments.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "RCLONE_"))
    }
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as own:  # two mounts must not share a cache
        if tool == "rclone":
            command = [
                "rclone",
                "mount",
                f":s3:{bucket.name}",
                str(path),
                f"--cache-dir={own}/cache",
                *flags,
            ]
            environ |= {
                "RCLONE_CONFIG": "/dev/null",
                "RCLONE_S3_PROVIDER": "Other",
                "RCLONE_S3_ENDPOINT": bucket.url,
            }
            environ |= {
                "RCLONE_S3_ACCESS_KEY_ID": bucket.key,
                "RCLONE_S3_SECRET_ACCESS_KEY": bucket.secret,
            }
        else:
            command = [
                "s3fs",
                bucket.name,
                str(path),
                "-f",
                f"-ourl={bucket.url}",
                "-ouse_path_request_style",
                *flags,
            ]
            environ |= {"AWSACCESSKEYID": bucket.key, "AWSSECRETACCESSKEY": bucket.secret}
        with open(f"{own}/log", "w") as log:
            # setpriv: a mount must not outlive this program, however it ends
            command = ["setpriv", "--pdeathsig", "TERM", *command]
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            wait_for(lambda: path.is_mount() or process.poll() is not None, MOUNT_DEADLINE_S)
            if not path.is_mount():
                said = Path(log.name).read_text()[-300:].strip() or "no word of it"
                raise RuntimeError(
                    f"{tool}: expected a mount at {path} in {MOUNT_DEADLINE_S} s, found: {said}"
                )
            yield process
        finally:
            # Lazily, so that a reader still in there cannot keep it; an error means that it is gone
            # already.
            subprocess.run(
                ["fusermount3", "-u", "-z", path],
                check=False,
                capture_output=True,
                timeout=END_DEADLINE_S,
            )
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:  # stuck in a request that its server does not answer
                process.kill()
                process.wait(END_DEADLINE_S)


def wait_for(condition, deadline_s: float) -> float | None:
    """Seconds until `condition()` is true, None if it is not within the deadline."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            return None
        time.sleep(LOOK_S)
    return time.monotonic() - began


# -------------------------------------------------------------------- what a run does to its bucket
class Run:
    """A trainer's files: `adapter(root, v)`, `checkpoint(root, v)` and `replace(root, v)` write
    version `v` of each."""

    def __init__(self):
        # before the imports, which read them
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        import torch
        from accelerate import Accelerator
        from peft import LoraConfig, get_peft_model
        from safetensors import SafetensorError

        # not an Exception, but a BaseException
        from torch.distributed.checkpoint import CheckpointException
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

        self.save_lora_adapter = save_lora_adapter
        self.errors = (OSError, ValueError, RuntimeError, SafetensorError, CheckpointException)

        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        tiny = Qwen2Config(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads
        )
        lora = LoraConfig(r=1, lora_alpha=2, target_modules="all-linear")
        self.torch, self.accelerator = torch, Accelerator(cpu=True)
        self.model = get_peft_model(Qwen2ForCausalLM(tiny), lora)

    def adapter(self, root: Path, version: int) -> Path:
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.fill_(version)  # no two versions have the same bytes
        path = root / "run" / ".vllm_lora" / f"trl-policy-v{version}"
        self.save_lora_adapter(self.model, self.accelerator, "default", str(path))
        return path

    def checkpoint(self, root: Path, version: int) -> Path:
        """The files of an FSDP2 checkpoint; torch writes .metadata under another name, syncs it and
        renames it."""
        import torch.distributed.checkpoint as dcp

        path = root / "run" / f"checkpoint-{version}"
        path.mkdir(parents=True)
        (path / "rollout_state.json").write_text(json.dumps({"model_version": version}))
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            dcp.save(
                {"w": self.torch.full((4000,), float(version))},
                checkpoint_id=path / part,
                no_dist=True,
            )
        return path

    def replace(self, root: Path, version: int) -> Path:
        path = root / "run" / "scoreboard.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps({"version": version}))
        os.replace(path.with_suffix(".tmp"), path)
        return path

    def check(self, root: Path, adapters: list[int], checkpoint: int) -> None:
        """Load everything as its users do; one of `errors` where something is missing or is not
        what was saved."""
        import safetensors
        import torch.distributed.checkpoint as dcp

        for version in adapters:
            path = root / "run" / ".vllm_lora" / f"trl-policy-v{version}"
            if json.loads((path / CONFIG).read_text())["r"] != 1:
                raise ValueError(f"{path / CONFIG}: expected rank 1")
            with safetensors.safe_open(path / WEIGHTS, "pt") as weights:
                found = {float(weights.get_tensor(name).unique()) for name in weights.keys()}
            if found != {version}:
                raise ValueError(f"{path / WEIGHTS}: expected weights of {version}, found {found}")
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            state = {"w": self.torch.zeros(4000)}
            dcp.load(
                state, checkpoint_id=root / "run" / f"checkpoint-{checkpoint}" / part, no_dist=True
            )
            if not bool((state["w"] == checkpoint).all()):
                raise ValueError(f"{part}: expected {checkpoint}, found {state['w'][:3]}")


def contents(path: Path) -> dict[str, bytes]:
    """Every file below `path` by its name relative to it."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


class Watch(threading.Thread):
    """Looks for `files` (name: bytes) below `path` by name, as vLLM does, until all are there and
    equal."""

    def __init__(self, path: Path, files: dict[str, bytes]):
        super().__init__(daemon=True)
        self.path, self.files = path, files
        self.seen_in_part: list[str] = []  # what was there while something was not
        self.complete_at: float | None = None
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.is_set():
            whole = [name for name, content in self.files.items() if self.read(name) == content]
            if len(whole) == len(self.files):
                self.complete_at = time.monotonic()
                return
            if whole and whole != self.seen_in_part[-1:]:
                self.seen_in_part = whole
            self.ended.wait(LOOK_S)

    def read(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            # first a stat, whose size a read then goes by
            return path.read_bytes() if path.is_file() else None
        except OSError:  # vanishing under a rename, say: not whole
            return None

    def seconds(self, since: float) -> float | None:
        """Seconds from `since` until the files were complete; None if they were not
        VISIBLE_DEADLINE_S later."""
        self.join(max(0.0, since + VISIBLE_DEADLINE_S - time.monotonic()))
        self.ended.set()
        late = self.complete_at is None or self.complete_at > since + VISIBLE_DEADLINE_S
        return None if late else max(0.0, self.complete_at - since)


# ------------------------------------------------------------------------------------- measurements
@dataclasses.dataclass
class Row:
    setting: Setting
    failed: str = ""  # the exception that a save raised
    save_s: list[float] = dataclasses.field(default_factory=list)
    # after the save returned; None: not seen
    visible_s: list[float | None] = dataclasses.field(default_factory=list)
    # for each save that was: what was seen first
    in_part: list[list[str]] = dataclasses.field(default_factory=list)
    checkpoint_s: float | None = None
    replaced_s: float | None = None
    # a file replaced while nobody looked is read cut short, or old, FORGET_S later
    stale: bool = False
    # files that the bucket lacks, or holds otherwise
    lost: list[str] = dataclasses.field(default_factory=list)
    third: str = ""  # why a fresh mount could not load everything
    unmounted: str = ""  # files in the bucket of those written just before an unmount

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"no: {self.failed}"
        if self.lost:
            return "no: loses files"
        if None in self.visible_s or self.checkpoint_s is None:
            return f"no: not seen in {VISIBLE_DEADLINE_S} s"
        if self.replaced_s is None:
            return f"in part: a replaced file is not seen in {VISIBLE_DEADLINE_S} s"
        if self.third:
            return f"no: {self.third}"
        return (
            f"yes, but a replaced file is cut short or old after {FORGET_S} s"
            if self.stale
            else "yes"
        )

    def log(self) -> dict:
        """What the table leaves out: each save, and which files were seen or lost."""
        return {key: value for key, value in vars(self).items() if key != "setting" and value}

    def markdown(self) -> str:
        seen = [seconds for seconds in self.visible_s if seconds is not None]
        roles = ("writer", self.setting.writer), ("reader", self.setting.reader)
        flags = "; ".join(f"{role}: `{' '.join(own) or 'none'}`" for role, own in roles)
        first = "".join(f", {name} first" for name in sorted({part[0] for part in self.in_part}))
        cells = (
            f"{self.setting.tool}, {self.setting.name}", flags, self.verdict,
            f"{statistics.median(self.save_s):.1f} s" if self.save_s else "-",
            f"{statistics.median(seen):.1f} / {max(seen):.1f} s" if seen else "-",
            f"{len(self.in_part)} of {len(self.visible_s)}{first}" if self.visible_s else "-",
            str(len(self.lost)) if self.visible_s else "-", self.unmounted or "-", self.setting.why,
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


COLUMNS = "mount|flags|works|save p50|visible p50 / max|seen in part|lost files"
COLUMNS += "|kept by an unmount at once|why"


def measure(
    setting: Setting, run: Run, saves: int = 10, spacing_s: float = 2.0, latency_s: float = 0.05
) -> Row:
    row = Row(setting)
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bucket = stack.enter_context(s3_server(latency_s))
        truth, writer, reader = temporary / "truth", temporary / "writer", temporary / "reader"
        with mount(setting.tool, bucket, writer, "writer", setting.writer):
            with mount(setting.tool, bucket, reader, "reader", setting.reader):
                try:
                    write_and_watch(row, run, bucket, (truth, writer, reader), saves, spacing_s)
                except run.errors as error:
                    row.failed = named(error)
                    return row
            wanted = contents(truth)
            wait_for(lambda: wanted.items() <= bucket.files().items(), VISIBLE_DEADLINE_S)
            found = bucket.files()
            row.lost = sorted(
                name for name, content in wanted.items() if found.get(name) != content
            )
            if row.checkpoint_s is not None:
                with mount(setting.tool, bucket, temporary / "third", "reader", setting.reader):
                    try:
                        run.check(
                            temporary / "third",
                            list(range(max(1, saves - KEPT + 1), saves + 1)),
                            saves,
                        )
                    except run.errors as error:
                        row.third = named(error)
        last = contents(run.adapter(truth, saves + 1))
        with mount(setting.tool, bucket, writer, "writer", setting.writer):
            run.adapter(writer, saves + 1)
        row.unmounted = (
            f"{sum(f'-v{saves + 1}/' in name for name in bucket.files())} of {len(last)} files"
        )
    return row


def write_and_watch(
    row: Row, run: Run, bucket: Bucket, roots: tuple[Path, Path, Path], saves: int, spacing_s: float
) -> None:
    """What a run writes, to a plain directory (`truth`) as well; fills `row` with what the reader
    sees of it."""
    truth, writer, reader = roots
    watches = []
    for version in range(1, saves + 1):
        began = time.monotonic()
        files = contents(run.adapter(truth, version))
        path = (reader / "run" / ".vllm_lora") / f"trl-policy-v{version}"
        watch = Watch(path, {name: files[name] for name in (CONFIG, WEIGHTS)})
        try:
            saving = time.monotonic()
            run.adapter(writer, version)
            watches.append((watch, time.monotonic()))
            row.save_s.append(time.monotonic() - saving)
        except BaseException:
            watch.ended.set()
            raise
        for root in (truth, writer) if version > KEPT else ():
            shutil.rmtree(
                root / "run" / ".vllm_lora" / f"trl-policy-v{version - KEPT}", ignore_errors=True
            )
        if version < saves:
            # the pace of syncs, not a wait for something
            time.sleep(max(0.0, began + spacing_s - time.monotonic()))
    for watch, saved in watches:
        row.visible_s.append(watch.seconds(saved))
        if watch.seen_in_part:
            row.in_part.append(watch.seen_in_part)
    if None in row.visible_s:  # it cannot carry the recipe, whatever it makes of the rest
        return

    # No two saves of a checkpoint are equal (torch writes a random id), so the truth is what the
    # writer reads back.
    relative = run.checkpoint(writer, saves).relative_to(writer)
    written = contents(writer / relative)
    row.checkpoint_s = Watch(reader / relative, written).seconds(time.monotonic())
    for name, content in written.items():
        (truth / relative / name).parent.mkdir(parents=True, exist_ok=True)
        (truth / relative / name).write_bytes(content)
    # the second is longer: a size that the reader remembers would cut it short
    for version in (1, 22):
        relative = run.replace(truth, version).relative_to(truth)
        watch = Watch(reader / relative.parent, {relative.name: (truth / relative).read_bytes()})
        run.replace(writer, version)
        row.replaced_s = watch.seconds(time.monotonic())
    content = run.replace(truth, 333).read_bytes()
    (reader / relative).stat()  # by somebody who only wants to know whether it is there
    run.replace(writer, 333)
    wait_for(lambda: bucket.files().get(str(relative)) == content, VISIBLE_DEADLINE_S)
    time.sleep(FORGET_S)
    row.stale = (reader / relative).is_file() and (reader / relative).read_bytes() != content


def refused(tool: str, how: str, run: Run, heal_s: float = VISIBLE_DEADLINE_S) -> str:
    """A table row: what a save and a checkpoint do while the bucket answers 403 ("403"), is "gone",
    or "hangs"."""
    with tempfile.TemporaryDirectory() as temporary, s3_server(0.02) as bucket:
        writer = Path(temporary) / "writer"
        with mount(tool, bucket, writer, "writer"):
            run.adapter(writer, 1), run.checkpoint(writer, 1)
            old = {str(file.relative_to(writer)) for file in writer.rglob("*") if file.is_file()}
            if wait_for(lambda: old <= bucket.files().keys(), VISIBLE_DEADLINE_S) is None:
                raise RuntimeError(
                    f"{tool}: expected {sorted(old)} in the bucket, found {sorted(bucket.files())}"
                )
            before = bucket.files()
            if how == "403":
                bucket.refuse_writes()
            else:
                bucket.server.send_signal(signal.SIGKILL if how == "gone" else signal.SIGSTOP)
            saved = attempt(run.adapter, run, writer)
            checkpointed = attempt(run.checkpoint, run, writer)
            if how == "gone":  # with moto's memory
                return f"| {tool} | {how} | {saved} | {checkpointed} | - | - |"
            bucket.server.send_signal(signal.SIGCONT)
            whole = before.items() <= bucket.files().items()
            bucket.allow_writes()
            arrived = wait_for(lambda: sum("-v2/" in name for name in bucket.files()) == 3, heal_s)
    healed = "never" if arrived is None else f"after {arrived:.0f} s"
    before = "intact" if whole else "DAMAGED"
    return f"| {tool} | {how} | {saved} | {checkpointed} | {before} | {healed} |"


def attempt(write, run: Run, root: Path) -> str:
    began = time.monotonic()
    try:
        write(root, 2)
        outcome = "no error"
    except run.errors as error:
        outcome = named(error).replace(str(root), "")
    return f"{outcome}, {time.monotonic() - began:.1f} s"


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def hold(tool: str, writer: str, reader: str) -> None:
    """Keep a pair mounted until stdin ends or a signal comes; RuntimeError if the server or a mount
    ends before."""
    with (
        s3_server() as bucket,
        mount(tool, bucket, writer, "writer") as w,
        mount(tool, bucket, reader, "reader") as r,
    ):
        say(
            f"[bucket] mounted {tool}: writer {writer}, reader {reader}, {bucket.url}/{bucket.name}"
        )
        ends = {
            os.pidfd_open(p.pid): name
            for p, name in ((bucket.server, "server"), (w, "writer"), (r, "reader"))
        }
        while True:
            ready, _, _ = select.select([sys.stdin, *ends], [], [])
            if fallen := [ends[end] for end in ready if end in ends]:
                raise RuntimeError(
                    f"expected the mounts to stay until stdin ends; the {fallen[0]}'s process ended"
                )
            if not os.read(sys.stdin.fileno(), 4096):
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tool", choices=sorted(ROBUST), help="only this one; --hold: rclone unless given"
    )
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument(
        "--latency-ms",
        type=float,
        default=50,
        help="of each request; S3 in its own region: 20 to 100",
    )
    parser.add_argument(
        "--refused", action="store_true", help="measure saves that the bucket does not take"
    )
    parser.add_argument(
        "--hold", nargs=2, metavar=("WRITER", "READER"), help="mount a pair and wait"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tools = (args.tool,) if args.tool else ("rclone",) if args.hold else tuple(ROBUST)
    if lacks := missing(() if args.serve else tools):
        say(f"[bucket] missing: {', '.join(lacks)}", sys.stderr)
        return 2
    if args.serve:
        serve(args.latency_ms / 1000)
        return 0

    # an exception, so that what is mounted is unmounted; a second one is too late
    def stop(number: int, frame) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(0 if args.hold else 128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)
    if args.hold:
        hold(tools[0], *args.hold)
        return 0
    run, lines = Run(), []
    if args.refused:
        columns = "mount | bucket | TRL's save | checkpoint | files before | refused save arrives"
        lines = [f"| {columns} once allowed |", "|---" * 6 + "|"]
        for tool in tools:
            for how in ("403", "gone", "hangs"):
                lines.append(refused(tool, how, run))
                say(f"[bucket] {lines[-1]}", sys.stderr)
    else:
        lines = [f"| {COLUMNS.replace('|', ' | ')} |", "|---" * 9 + "|"]
        for setting in SETTINGS:
            if setting.tool in tools:
                row = measure(setting, run, args.saves, latency_s=args.latency_ms / 1000)
                lines.append(row.markdown())
                say(
                    f"[bucket] {setting.tool}, {setting.name}: {row.verdict} {row.log()}",
                    sys.stderr,
                )
        lines += NOT_MEASURED
    say("\n".join(lines))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"[bucket] {error}")
