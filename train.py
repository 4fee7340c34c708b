"""Asynchronous GRPO with a rank-1 LoRA: the trainer. One adapter of a few MB is all that ever reaches the replicas.

    torchrun --nproc-per-node gpu train.py        # inside the trainer Job; `launch.sh` does this

500 steps on two H200s with three replicas take about an hour and $25 (the write-up's run 5: 53 min). You should see
`Adapter-only vLLM sync enabled`, then one line a step; at the end a table, `scoreboard.json` and `scoreboard.png`.

Departures from the LoRA recipe of Qi et al. (arXiv 2510.26788), as in the write-up:
1. advantages are vanilla GRPO's (TRL's), not Dr. GRPO's; 2. the loss is a mean over tokens, not divided by a constant;
3. no truncated importance sampling; 4. trained on the sanity set, not on MATH-12k.
"""

import contextlib
import functools
import glob
import inspect
import io
import json
import logging
import math
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import requests
import torch
import trackio
from accelerate.utils import broadcast_object_list
from datasets import load_dataset
from peft import LoraConfig
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.integrations import TrackioCallback, rewrite_logs
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

# What differs from Job to Job comes from the environment (launch.sh sets it) ...
RUN = os.environ.get("RUN", "run")  # names the directory in the bucket; the same name resumes
MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-Math-1.5B")
DATASET = os.environ.get("DATASET", "sail/Sanity-Test-R1D-1.5B")  # columns: prompt, reward_model.ground_truth
EVAL_DATASET = os.environ.get("EVAL_DATASET", "HuggingFaceH4/MATH-500")  # columns: problem, answer; "" for none
MAX_STEPS = int(os.environ.get("MAX_STEPS", "500"))
MAX_STALENESS = int(os.environ.get("MAX_STALENESS", "4"))  # versions; serve.sh derives its slots from it
LORA_RANK = int(os.environ.get("LORA_RANK", "1"))  # serve.sh derives its bound from it
OUTPUT_DIR = os.path.join(os.environ.get("MOUNT", "/lora"), RUN)  # in the bucket, at the same path in every Job
PROXY = f"http://127.0.0.1:{os.environ.get('PROXY_PORT', '8000')}"
SPACE = os.environ.get("TRACKIO_SPACE_ID") or None  # user/name: the dashboard as a Space; None: in this machine

# ... the recipe is constants: the write-up's run 5.
LEARNING_RATE = 4e-5  # constant; ten times full fine-tuning's
NUM_GENERATIONS = 8  # completions a prompt
MAX_COMPLETION = 3000  # tokens; with the prompt it must fit serve.sh's CONTEXT
TOKEN_BUDGET = 16384  # tokens a rank packs into one row; run 1: 0, one sample a row
ACCUMULATION = 6  # rows a rank and step: about 150 samples in all; run 1: 64
GRADIENT_CHECKPOINTING = False  # runs 1 and 2: True
MAX_INFLIGHT = 384  # requests, 128 a replica; runs 1 to 4: 128
QUEUE_SIZE = 768  # scored samples waiting for the trainer; runs 1 to 4: 512
SYNC_STEPS = 4  # optimizer steps between two policies
SAVE_STEPS = 50  # optimizer steps between two checkpoints
EVAL_PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def say(text, prefix="[train] "):
    """A line in one write, for several processes share this output: print() may write a line and its end apart."""
    sys.stdout.write(f"{prefix}{text}\n")
    sys.stdout.flush()


# ---- The reward

ANSWER_CHARS = 300  # a longer answer is wrong unread; ground truths in MATH stay below 200
SYMPY_SECONDS = 4  # for one comparison (0.02 to 0.2 is normal); then its process dies, and the answer is wrong
SYMPY_BYTES = 2 << 30  # address space of that process; idle it takes 60 MB


def boxed_answer_reward(completions, completion_ids, ground_truth, eos_token_id: int, **kwargs) -> list[float]:
    r"""1.0 where a completion ended by itself and its last `\boxed{}` equals the ground truth, else 0.0.

    TRL calls this in a thread of its rollout process, a group at a time, with a list for each dataset column. It
    passes no finish reason, but the token ids as vLLM returned them: EOS is the last one unless the completion was
    cut off (also at the end of the context, which its length does not tell). Bind `eos_token_id` with `partial`.
    """
    return [
        float(ids[-1:] == [eos_token_id] and answers_equal(gold, last_boxed(completion[-1]["content"])))
        for completion, ids, gold in zip(completions, completion_ids, ground_truth, strict=True)
    ]


def last_boxed(text: str) -> str:
    r"""Content of the last `\boxed{`; "" if there is none, or it does not close within ANSWER_CHARS."""
    start = max((match.end() for match in re.finditer(r"\\boxed\s*\{", text)), default=len(text))
    depth = 1
    for token in re.finditer(r"\\.|[{}]", text[start : start + ANSWER_CHARS + 1], re.DOTALL):  # \{ opens nothing
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[start : start + token.start()]
    return ""


SPELLINGS = [  # what LaTeX can write in several ways, in one way; applied in this order
    (r"(?<!\\)\\!|(?<!\\)\$|\\(left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", ""),
    (r"((?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s)+", " "),
    (r"\{,\}", ","),
    (r"\\%|%|°|\^(\{ ?\\circ ?\}| ?\\circ(?![a-zA-Z]))", ""),  # as the MATH benchmark: 10\% is 10, 90^\circ is 90
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac ?(\d) ?(?=[\d{])", r"\\frac{\1}"),
    (r"(\\frac ?\{[^{}]*\}) ?(\d)", r"\1{\2}"),
    (r"\\sqrt ?(\d)", r"\\sqrt{\1}"),
    (r"([_^]) ?\{ ?(\w) ?\}", r"\1\2"),
    (r"\\(text(bf|it|rm|normal)?|mathrm|mathbf|mbox) ?\{", r"\\text{"),
    (r",? ?\\text\{ ?(and|or) ?\} ?|,? (and|or) ", ", "),
    (r"^ | ?\.? ?$", ""),
    (r"^(-?) ?\\\$(.*)", r"\1\2\\text{dollars}"),
]
UNIT = re.compile(r"(.*[\d})]) ?\\text\{((?![^}]*(?:thousand|illion))[^{}]*\} ?(?:\^[23])?)")


def normalize(answer: str) -> tuple[str, str]:
    """(value, unit) of a LaTeX answer, in one of its spellings."""
    for pattern, replacement in SPELLINGS:
        answer = re.sub(pattern, replacement, answer)
    match = UNIT.fullmatch(answer)
    value, unit = (match[1], re.sub(r"[ .}]", "", match[2]).lower()) if match else (answer, "")
    if re.fullmatch(r"-?[1-9]\d{0,2}([, ])\d{3}(\1\d{3})*(\.\d+)?", value):  # 1,657 is a number; 1, 657 is a list
        value = re.sub("[, ]", "", value)
    value = re.sub(r"^\\text\{([^{}]*)\}$|\\text\{ ?(\w) ?\}", r"\1\2", value)
    value = re.sub(r"(\d (?=\d)|\\[a-zA-Z]+ (?=[a-zA-Z]))| ", r"\1", value)  # only the spaces in `1 1/2`, `\pi r` count
    value = re.sub(r"^[a-zA-Z]\\in ?(?![a-zA-Z])|^\(([A-Z])\)$", r"\1", value)  # x\in[0,1] is [0,1]; choice (C) is C
    if re.fullmatch(r"[a-zA-Z]{2,}", value):  # Yes is yes
        value = value[0].lower() + value[1:]
    return value.replace(",", ", "), unit


def number(value: str) -> Fraction | None:
    r"""An integer, a decimal, `a/b` or `\frac{a}{b}` as an exact number."""
    value = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", value)
    return Fraction(value) if re.fullmatch(r"-?\d+/0*[1-9]\d*|-?\d*\.?\d+", value) else None


def sympy_misreads(gold: str, answer: str) -> bool:
    """Whether math-verify might call these two equal although they are not."""
    pair = (gold, answer)
    relation = [("=" in value, bool(re.search(r"[<>]|\\[lgn]eq?(?![a-zA-Z])", value))) for value in pair]
    brackets = [value[0] + value[-1] if value[:1] in ("(", "[") else "" for value in pair]
    commas = [value.count(",") for value in pair]
    repeats = [len(set(value.split(", "))) < value.count(",") + 1 for value in pair]
    return (
        any(re.fullmatch(r"[a-zA-Z, ]*|.*\d([_:]| \d).*", value) for value in pair)  # words, 101_2, 10:30, 1 1/2
        or gold.lower() == answer.lower()  # A is not a
        or relation[0] != relation[1]  # 7=5 is not 5
        or (all(commas) and (brackets[0] != brackets[1] or commas[0] != commas[1]))  # nor (1,2) 1,2
        or (any(repeats) and not brackets[0])  # nor 1,1,2 the same as 1,2,2
    )


@functools.lru_cache(maxsize=10_000)  # a group's completions mostly give the same few answers
def answers_equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers mean the same. In doubt they do not: a wrong reward teaches a wrong answer."""
    if not answer or len(answer) > ANSWER_CHARS:
        return False
    (gold, gold_unit), (answer, answer_unit) = normalize(gold), normalize(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    if ("=" in gold) != ("=" in answer):  # x=5 is 5; x=1, x=2 is 1, 2; f(x)=x+1 is x+1
        name = re.match(r"([a-zA-Z](\([a-zA-Z]\))?=)?", gold if "=" in gold else answer)[0]
        gold, answer = gold.replace(name, ""), answer.replace(name, "")
    numbers = number(gold), number(answer)
    if gold == answer or None not in numbers:  # most answers end here
        return gold == answer or numbers[0] == numbers[1]
    return not sympy_misreads(gold, answer) and sympy_equal(gold, answer)


def sympy_worker(seconds: int, max_bytes: int) -> None:
    """Answer each line `[gold, answer]` on stdin with `[equal, bytes of memory in use]`, until stdin is closed."""
    import json
    import logging
    import resource
    import signal
    import sys

    signal.alarm(120)  # for the imports
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # it warns that its own time limits are off
    config = [LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, boxed="none"))]

    def equal(*pair: str) -> bool:
        gold, answer = (parse(f"${v}$", config, fallback_mode="no_fallback", parsing_timeout=None) for v in pair)
        return verify(gold, answer, float_rounding=12, timeout_seconds=None)  # by default 0.333333 is 1/3

    equal(r"1.5\cdot10^3", "1500")  # the first use imports the rest of sympy
    signal.alarm(0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        signal.alarm(seconds)  # nobody handles SIGALRM: the kernel ends this process, whatever sympy is doing
        verdict = equal(*json.loads(line))
        signal.alarm(0)
        with open("/proc/self/statm") as statm:  # not getrusage: at birth it already counts the parent's gigabytes
            bytes_in_use = int(statm.read().split()[0]) * resource.getpagesize()
        sys.stdout.write(json.dumps([verdict, bytes_in_use]) + "\n")
        sys.stdout.flush()


# sympy cannot be interrupted in a thread, and TRL's rollout process is daemonic: multiprocessing (so also
# concurrent.futures and pebble) refuses to start children in it. So the worker is a plain subprocess. It is given its
# function's source, not this file: the imports up there (torch, TRL) would cost it seconds and a gigabyte.
SYMPY_PROGRAM = f"{inspect.getsource(sympy_worker)}\nsympy_worker({SYMPY_SECONDS}, {SYMPY_BYTES})"
IDLE_WORKERS: queue.SimpleQueue = queue.SimpleQueue()  # as many as threads ever asked at once: with TRL, one


def sympy_equal(gold: str, answer: str) -> bool:
    """Ask a worker process. No reply (it ran out of time or memory) means not equal; the next call starts another."""
    worker = None
    while worker is None or worker.poll() is not None:
        try:
            worker = IDLE_WORKERS.get_nowait()
        except queue.Empty:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            worker = subprocess.Popen([sys.executable, "-c", SYMPY_PROGRAM], text=True, **pipes)
            if worker.stdout.readline() != "ready\n":
                raise RuntimeError(
                    "the sympy worker did not start: is math-verify installed? Its error is above."
                ) from None
    worker.stdin.write(json.dumps([gold, answer]) + "\n")
    worker.stdin.flush()
    reply = worker.stdout.readline()
    equal, bytes_in_use = json.loads(reply) if reply else (False, SYMPY_BYTES)
    if bytes_in_use < SYMPY_BYTES / 4:
        IDLE_WORKERS.put(worker)
    else:
        worker.communicate()  # dead, or so large that what sympy caches could starve the next answers: let it end
    return equal


# ---- Checkpoints: a Job can die while it writes one


def newest_checkpoint(deadline_s: float = 60) -> str | None:
    """Path of the newest checkpoint whose files are all there with the sizes its manifest lists, or None.

    One without a manifest was being written when its trainer died: it is skipped. One with a manifest whose files are
    not all there may only be late (a bucket shows files one by one): it is waited for, up to `deadline_s`.
    """
    found = glob.glob(f"{OUTPUT_DIR}/checkpoint-*")
    for path in sorted(found, key=step_of, reverse=True):
        until = time.monotonic() + deadline_s
        while (missing := missing_files(path)) and missing != ["manifest.json"] and time.monotonic() < until:
            time.sleep(1)
        if not missing:
            return path
        say(f"skipped {path}: incomplete, {missing[0]} is not there or cut short ({len(missing)} files)")
        shutil.rmtree(path, ignore_errors=True)  # its files must not mix with those of the same step, written again
    return None


def step_of(checkpoint: str | None) -> int:
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def missing_files(checkpoint: str) -> list[str]:
    try:
        with open(f"{checkpoint}/manifest.json") as file:
            sizes = json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return ["manifest.json"]
    paths = {name: os.path.join(checkpoint, name) for name in sizes}
    return [n for n, path in paths.items() if not os.path.isfile(path) or os.path.getsize(path) != sizes[n]]


def highest_published_version() -> int:
    """Highest N of `.vllm_lora/trl-policy-vN` in this run's directory: numbering goes on after it, whatever the
    checkpoint says. vLLM keys its prefix cache by name: a name used twice would mix two policies' weights."""
    names = glob.glob(f"{OUTPUT_DIR}/.vllm_lora/trl-policy-v*")
    return max((int(name.rpartition("-v")[2]) for name in names), default=0)


# ---- Reading a run


def diagnose(seen: dict) -> tuple[str, str]:
    """(bottleneck, advice with the figures behind it) from TRL's metrics, by the write-up's way of reading a run.

    `seen`: step_s, fwd_bwd_s, rollout_wait_s, weight_sync_s (s, medians), queue (samples), inflight (requests), and the
    constants queue_size, max_inflight, token_budget, gradient_checkpointing, sync_steps. A figure that is missing is
    not used.
    """
    if not (step := seen.get("step_s")):
        return "unknown", "one step is too short a run to read"
    sync = (seen.get("weight_sync_s") or 0) / seen["sync_steps"] / step
    busy = seen["fwd_bwd_s"] / step
    wait = seen.get("rollout_wait_s")
    wait = max(0.0, 1 - busy - sync) if wait is None else wait / step
    fill = seen["queue"] / seen["queue_size"] if seen.get("queue") is not None else None
    capped = seen.get("inflight") is not None and seen["inflight"] >= 0.97 * seen["max_inflight"]
    facts = f"step {step:.1f} s: forward/backward {busy:.0%}, waiting {wait:.0%}, sync {sync:.0%}"
    facts += "" if fill is None else f"; queue {fill:.0%} full"
    facts += "" if seen.get("inflight") is None else f"; {seen['inflight']:.0f}/{seen['max_inflight']} in flight"
    if wait > 0.1 and capped:
        return "in-flight-capped", f"raise MAX_INFLIGHT and QUEUE_SIZE: vLLM is not asked for more ({facts})"
    if wait > 0.1:
        return "generation-bound", f"add a replica (REPLICAS), or shorten the sync first if it is long ({facts})"
    if sync > 0.15:
        return "sync-bound", f"a sync stops the trainer: look at perf/weight_sync_*_s, or raise SYNC_STEPS ({facts})"
    if busy > 0.8 and not seen["token_budget"]:
        return "trainer-bound", f"set TOKEN_BUDGET=16384: pack many samples into a row ({facts})"
    if busy > 0.8 and seen["gradient_checkpointing"]:
        return "trainer-bound", f"set GRADIENT_CHECKPOINTING=False, memory permitting ({facts})"
    if busy > 0.8 and fill is not None and fill > 0.9:
        return "trainer-bound", f"more GPUs for the trainer, or fewer replicas: the queue stays full ({facts})"
    return "balanced", f"nothing to turn: the trainer computes and rarely waits ({facts})"


def figures(history: list[dict]) -> dict:
    """Medians of `history` (TRL's logged metrics, one dict a step) in the form `diagnose` reads."""

    def median(key):
        values = [log[key] for log in history if log.get(key) is not None]
        return statistics.median(values) if values else None

    return {
        "step_s": median("perf/step_s"), "fwd_bwd_s": median("perf/fwd_bwd_s"),
        "rollout_wait_s": median("perf/rollout_wait_s"), "weight_sync_s": median("perf/weight_sync_s"),
        "queue": median("sample/rollout_queue_size"), "inflight": median("rollout/inflight"),
        "queue_size": QUEUE_SIZE, "max_inflight": MAX_INFLIGHT, "token_budget": TOKEN_BUDGET,
        "gradient_checkpointing": GRADIENT_CHECKPOINTING, "sync_steps": SYNC_STEPS,
    }  # fmt: skip


class RunCallback(TrainerCallback):
    """Continues the numbering of policies at the start, prints a line a step, completes checkpoints, and empties the
    queue at the end, so that the rollout process can leave at once."""

    def __init__(self):
        self.trainer, self.started, self.wall_s = None, time.monotonic(), 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with contextlib.redirect_stdout(io.StringIO()):  # trackio's greeting: six lines, colours, no news
                trackio.init(project=args.project, name=RUN, space_id=SPACE, resume="allow", config=args.to_dict())
            say(f"dashboard: {f'https://huggingface.co/spaces/{SPACE}' if SPACE else 'trackio show, see README.md'}")
        # Runs before the trainer's own callback, which publishes the first policy under the next number.
        self.trainer.model_version = max(self.trainer.model_version, highest_published_version())
        self.wall_s = next((log["wall_s"] for log in reversed(state.log_history) if "wall_s" in log), 0.0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "ratio" not in logs:
            return
        trackio.log(rewrite_logs(logs), step=state.global_step)  # transformers' own callback counts steps by itself
        history = [log for log in state.log_history if "ratio" in log]
        history[-1]["wall_s"] = self.wall_s + time.monotonic() - self.started  # kept in checkpoints, as all of them
        recent, value = history[-20:], lambda key: logs.get(key) or 0.0
        steps = [log["perf/step_s"] for log in recent if log.get("perf/step_s")]
        left = statistics.median(steps) * (state.max_steps - state.global_step) / 60 if steps else 0
        say(
            f"step {state.global_step:>4}/{state.max_steps}  left {left:5.1f} min  "
            f"reward {statistics.mean(log['reward'] for log in recent):.3f}  ratio {logs['ratio']:.4f}  "
            f"step {value('perf/step_s'):6.2f} s = fwd+bwd {value('perf/fwd_bwd_s'):.2f} "
            f"+ wait {value('perf/rollout_wait_s'):.2f} + sync {value('perf/weight_sync_s'):.2f}  "
            f"queue {value('sample/rollout_queue_size'):4.0f}/{QUEUE_SIZE}  "
            f"in flight {value('rollout/inflight'):4.0f}/{MAX_INFLIGHT}  "
            f"staleness {value('sample/staleness_mean'):.1f}  {value('rollout/generated_tok_s'):6.0f} tok/s"
        )
        if state.global_step % 20 == 0 and steps:
            bottleneck, advice = diagnose(figures(recent))
            say(f"{bottleneck}: {advice}")

    def on_save(self, args, state, control, **kwargs):
        checkpoint, accelerator = f"{args.output_dir}/checkpoint-{state.global_step}", self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model)
        with tempfile.TemporaryDirectory() as scratch:  # TRL renames what it saves, and a mount may not read that soon
            save_lora_adapter(model, accelerator, "default", f"{scratch}/adapter")  # every rank has a shard of it
            accelerator.wait_for_everyone()  # and has written its shards of the rest
            if not state.is_world_process_zero:
                return
            copy_files(f"{scratch}/adapter", f"{checkpoint}/adapter")
        files = [
            path for path in glob.glob(f"{checkpoint}/**", recursive=True, include_hidden=True) if os.path.isfile(path)
        ]
        sizes = {os.path.relpath(path, checkpoint): os.path.getsize(path) for path in files}
        write_json(f"{checkpoint}/manifest.json", sizes)
        say(f"checkpoint-{state.global_step} complete: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # TRL now stops the rollout process, which cannot end while its samples sit unread in the pipe.
            threading.Thread(target=drain, args=(self.trainer.rollout_worker.rollout_buffer,), daemon=True).start()
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.finish()


def drain(samples, seconds: float = 20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            samples.get(timeout=0.5)
        except (queue.Empty, OSError, EOFError):
            continue


# ---- Did it learn, and what did it cost?


def interval(right: int, asked: int) -> list[float]:
    """95 % Wilson interval of a proportion."""
    z, p = 1.96, right / asked
    middle, half = p + z * z / (2 * asked), z * math.sqrt(p * (1 - p) / asked + z * z / (4 * asked * asked))
    return [round((middle + sign * half) / (1 + z * z / asked), 4) for sign in (-1, 1)]


def evaluate(tokenizer, policies: dict[str, str]) -> dict:
    """Greedy accuracy on EVAL_DATASET of each policy ({label: name that the proxy knows}): the same prompts, grader
    and replicas for all. requests.HTTPError if the proxy refuses."""
    rows = load_dataset(EVAL_DATASET, split="test")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": EVAL_PROMPT.format(problem=row["problem"])}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for row in rows
    ]

    def ask(job):
        policy, prompt, gold = job
        request = {"model": policy, "prompt": prompt, "max_tokens": MAX_COMPLETION, "temperature": 0}
        response = requests.post(f"{PROXY}/v1/completions", json=request, timeout=600)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        return choice["finish_reason"] == "stop" and answers_equal(gold, last_boxed(choice["text"]))

    result = {"eval_questions": len(rows)}
    with ThreadPoolExecutor(MAX_INFLIGHT) as pool:
        jobs = [
            (policy, p, row["answer"]) for policy in policies.values() for p, row in zip(prompts, rows, strict=True)
        ]
        marks = list(pool.map(ask, jobs))
    for i, label in enumerate(policies):
        right = sum(marks[i * len(rows) : (i + 1) * len(rows)])
        result |= {f"accuracy_{label}": right / len(rows), f"accuracy_{label}_95": interval(right, len(rows))}
    return result


def cost() -> dict:
    """`cost_usd` of this run's Jobs so far, from their own durations and the hardware's prices; {} outside a Job."""
    if "JOB_ID" not in os.environ:
        return {}
    from huggingface_hub import HfApi

    api = HfApi()
    hourly = {hardware.name: hardware.unit_cost_usd * 60 for hardware in api.list_jobs_hardware()}
    jobs = {}
    for job in api.list_jobs(labels={"run": RUN}):
        role, seconds = (job.labels or {}).get("role", "job"), (job.durations and job.durations.running_secs) or 0
        jobs[f"{role} {job.id}"] = round(seconds / 3600 * hourly.get(job.flavor, 0.0), 4)
    return {"cost_usd": round(sum(jobs.values()), 4), "cost_usd_jobs": jobs}


POST = {  # the write-up's runs 1 and 5, on H200s
    "steps": (500, 500), "wall_s": (12420, 3180), "reward_first": (0.145, 0.145), "reward_last": (0.438, 0.416),
    "ratio_min": (0.9993, None), "ratio_max": (1.0004, None), "step_s_p50": (22.9, 4.8), "fwd_bwd_s_p50": (21.9, 4.6),
    "weight_sync_s_p50": (8.5, 6.2), "staleness_mean": (1.5, 2.0), "samples_trained": (None, 84078), "replicas": (2, 3),
}  # fmt: skip


def scoreboard(history: list[dict], adapter: str) -> dict:
    """What the run did, from TRL's metrics (one dict a step, from the checkpoint on after a resume) and the proxy."""
    stats = requests.get(f"{PROXY}/stats", timeout=10).json()
    replicas = len(stats.pop("replicas"))
    stats.pop("adapters")
    seen, column = figures(history), lambda key: [log[key] for log in history if log.get(key) is not None]
    syncs, rewards, ratios = column("perf/weight_sync_s"), column("reward"), column("ratio")
    bottleneck, advice = diagnose(seen)
    return {
        "steps": len(history), "wall_s": history[-1]["wall_s"], "reward_first": statistics.mean(rewards[:10]),
        "reward_last": statistics.mean(rewards[-10:]), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "step_s_p50": seen["step_s"], "fwd_bwd_s_p50": seen["fwd_bwd_s"], "rollout_wait_s_p50": seen["rollout_wait_s"],
        "weight_sync_s_first": syncs[0], "weight_sync_s_p50": statistics.median(syncs[1:] or syncs),
        "syncs": len(syncs), "staleness_mean": statistics.mean(column("sample/staleness_mean")),
        "samples_trained": round(sum(column("batch/samples_per_step"))), "routing": stats, "replicas": replicas,
        "adapter": adapter, "bottleneck": bottleneck, "advice": advice,
    }  # fmt: skip


def table(board: dict) -> str:
    """The scoreboard beside the write-up's runs 1 and 5."""

    def cell(value):
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [f"{'':<22}{'this run':>14}{'post, run 1':>14}{'post, run 5':>14}"]
    for key, value in board.items():
        if isinstance(value, (int, float)):
            lines.append(f"{key:<22}{cell(value):>14}" + "".join(f"{cell(v):>14}" for v in POST.get(key, (None, None))))
    return "\n".join(line.rstrip() for line in lines)


def picture(history: list[dict], path: str):
    """Six panels over the steps: reward, ratio, where a step's time goes, queue, staleness, syncs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, column = [log["step"] for log in history], lambda key: [log.get(key) or math.nan for log in history]
    reward = column("reward")
    fig, axes = pyplot.subplots(2, 3, figsize=(15, 7), layout="constrained")
    fig.suptitle(f"{RUN}: {MODEL.rpartition('/')[2]}, rank {LORA_RANK}, {len(steps)} steps")
    (a, b, c), (d, e, f) = axes
    a.plot(steps, reward, color="lightsteelblue", label="a step")
    means = [statistics.mean(reward[max(0, i - 19) : i + 1]) for i in range(len(reward))]
    a.plot(steps, means, color="navy", label="mean of 20 steps")
    b.plot(steps, column("ratio"), color="seagreen")
    b.axhline(1, color="grey", linewidth=0.8)
    parts = [[log.get(key) or 0 for log in history] for key in ("perf/fwd_bwd_s", "perf/rollout_wait_s")]
    syncs = [log.get("perf/weight_sync_s") or 0 for log in history]
    c.stackplot(steps, *parts, syncs, labels=["forward + backward", "waiting for rollouts", "weight sync"])
    d.plot(steps, column("sample/rollout_queue_size"), color="darkorange")
    d.axhline(QUEUE_SIZE, color="grey", linewidth=0.8, label=f"its size, {QUEUE_SIZE}")
    e.plot(steps, [log.get("sample/staleness_mean") or 0 for log in history], color="purple", label="mean")
    e.axhline(MAX_STALENESS, color="grey", linewidth=0.8, label="dropped beyond")
    f.bar([s for s, y in zip(steps, syncs, strict=True) if y], [y for y in syncs if y], width=2, color="teal")
    titles = ("reward", "ratio of trainer to replica probabilities", "seconds a step", "samples waiting in the queue",
              "staleness of samples (policy versions)", "seconds a weight sync")  # fmt: skip
    for ax, title in zip(axes.flat, titles, strict=True):
        ax.set(title=title, xlabel="optimizer step")
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False)
    fig.savefig(path, dpi=80)


def finish(tokenizer, checkpoint: str):
    """What is left to do after the last step, all of it from its `checkpoint`, so that a trainer that dies here goes on
    here: final adapter, scoreboard, held-out accuracy, picture, table. The scoreboard is written before the replicas
    are asked, so that their failure costs the accuracy only."""
    adapter, staged = f"{OUTPUT_DIR}/final-adapter", f"{OUTPUT_DIR}/.final-adapter.tmp"
    for path in (staged, adapter):
        shutil.rmtree(path, ignore_errors=True)
    copy_files(f"{checkpoint}/adapter", staged)
    os.rename(staged, adapter)
    with open(f"{checkpoint}/trainer_state.json") as file:
        history = [log for log in json.load(file)["log_history"] if "ratio" in log]
    board = scoreboard(history, adapter) | cost()
    write_json(f"{OUTPUT_DIR}/scoreboard.json", board)
    picture(history, f"{OUTPUT_DIR}/scoreboard.png")
    if EVAL_DATASET:
        try:
            final = f"final-step-{step_of(checkpoint)}"
            order = {"lora_name": final, "lora_path": os.path.abspath(adapter)}
            requests.post(f"{PROXY}/v1/load_lora_adapter", json=order, timeout=600).raise_for_status()
            board |= evaluate(tokenizer, {"base": MODEL, "trained": final}) | cost()
            write_json(f"{OUTPUT_DIR}/scoreboard.json", board)
        except requests.RequestException as error:
            say(f"no held-out accuracy: {error}")
    for line in table(board).splitlines():
        say(line, prefix="")
    say(f"{board['bottleneck']}: {board['advice']}")
    say(f"final adapter {adapter}, scoreboard {OUTPUT_DIR}/scoreboard.json and .png")


def copy_files(source: str, target: str):
    """Contents alone: shutil.copytree also copies extended attributes, for which rclone's mount has EIO."""
    os.makedirs(target, exist_ok=True)
    for name in os.listdir(source):
        shutil.copyfile(f"{source}/{name}", f"{target}/{name}")


def write_json(path: str, data: dict):
    with open(f"{path}.part", "w") as file:
        json.dump(data, file, indent=1)
    os.replace(f"{path}.part", path)


# ---- The run


def main():
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # TRL does not recognise Qwen2.5-Math's chat template; it is plain ChatML: an answer is one field, up to the end.
    content = {"close_pattern": r"<\|im_end\|>|<\|endoftext\|>", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": {"content": content},
    }  # fmt: skip

    dataset = load_dataset(DATASET, split="train")
    dataset = dataset.map(
        lambda row: {"prompt": row["prompt"], "ground_truth": str(row["reward_model"]["ground_truth"])},
        remove_columns=dataset.column_names,
    ).shuffle(seed=0)
    reward = functools.partial(boxed_answer_reward, eos_token_id=tokenizer.eos_token_id)

    args = AsyncGRPOConfig(
        output_dir=OUTPUT_DIR,
        max_steps=MAX_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION,
        temperature=1.0,
        top_p=1.0,
        token_budget=TOKEN_BUDGET,
        per_device_train_batch_size=1,  # samples a row where TOKEN_BUDGET is 0
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=GRADIENT_CHECKPOINTING,
        bf16=torch.cuda.is_available(),
        weight_sync_steps=SYNC_STEPS,
        max_staleness=MAX_STALENESS,
        max_inflight_tasks=MAX_INFLIGHT,
        queue_maxsize=QUEUE_SIZE,
        vllm_server_base_url=PROXY,
        save_steps=SAVE_STEPS,
        # FSDP2: each rank keeps its shard of the weights and writes its shard of a checkpoint. Weights stay gathered
        # after the forward pass: 3 GB more memory, one all-gather less a row.
        fsdp=True if ranks > 1 else None,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": False}
        if ranks > 1
        else None,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",  # its warnings are none here: a list of all callbacks, for each rank
        log_level_replica="error",
        report_to="trackio",
        project="async-grpo-lora",
        run_name=RUN,
        trackio_space_id=SPACE,
    )
    rank_0 = args.process_index == 0
    if rank_0:
        say(f"{RUN}: {MODEL}, rank {LORA_RANK}, {MAX_STEPS} steps on {ranks} ranks, output in {OUTPUT_DIR}")
    [checkpoint] = broadcast_object_list([newest_checkpoint() if rank_0 else None])
    if rank_0:
        say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint to resume from: step 0")
    if step_of(checkpoint) < MAX_STEPS:  # else this run died between its last checkpoint and its end
        train(args, tokenizer, dataset, reward, checkpoint)
        checkpoint = f"{OUTPUT_DIR}/checkpoint-{MAX_STEPS}"  # transformers saves the last step, whatever SAVE_STEPS
    if rank_0:  # no other rank waits for it: they have ended, or are about to
        finish(tokenizer, checkpoint)


def train(args, tokenizer, dataset, reward, checkpoint: str | None):
    rank_0 = args.process_index == 0
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM")
    callback = RunCallback()
    logging.basicConfig(format="[trl] %(message)s")
    trl_log = logging.getLogger("trl.experimental.async_grpo.async_grpo_trainer")
    trl_log.setLevel(logging.INFO)  # for `Adapter-only vLLM sync enabled`; its other lines come with every sync
    trainer = AsyncGRPOTrainer(
        model=MODEL, reward_funcs=reward, args=args, train_dataset=dataset, processing_class=tokenizer,
        peft_config=lora, callbacks=[callback],
    )  # fmt: skip
    trl_log.setLevel(logging.WARNING)
    trainer.remove_callback(PrinterCallback)  # one line a step says it; everything else goes to trackio
    trainer.remove_callback(TrackioCallback)  # see RunCallback.on_log
    callback.trainer = trainer
    if rank_0 and trainer.weight_transfer is not None:
        sys.exit("[train] TRL would send merged weights over NCCL, not the adapter: its warning above says why")

    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except requests.RequestException:  # also an OSError, but the proxy's
        raise
    except (OSError, CheckpointException) as error:
        sys.exit(
            f"[train] {OUTPUT_DIR} refused a write or a read: {error}. Is the bucket mounted read-write, is it full? "
            "Everything up to the newest checkpoint is kept: launch again with the same RUN"
        )

    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
