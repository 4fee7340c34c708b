"""Asynchronous GRPO with a rank-1 LoRA: the trainer.

    torchrun --nproc-per-node gpu train.py    # what `launch.sh` starts in the trainer Job
    python train.py check                     # can this be trained? asks for no GPU and no replica

Every SYNC_STEPS optimizer steps TRL saves the adapter, a few MB, to the bucket and asks proxy.py to
load it; nothing else ever reaches the replicas. Every SAVE_STEPS a checkpoint goes there, too: the
same RUN resumes from it.

500 steps on two H200s with three replicas take about an hour and cost $25 (the write-up's run 5: 53
minutes). You should see `Adapter-only vLLM sync enabled`, then one line per optimizer step, and at
the end `final-adapter` and `scoreboard.json` in the run's directory; `bench/report.py` reads them.

Yours to change: the constants of the recipe; `boxed_answer_reward`, which is what the run is about;
`training_example` and `held_out_example`, which say what the columns of your data mean. TRL and
vLLM fix the rest: the names of policies, the directory .vllm_lora, what a checkpoint holds.

Departures from the LoRA recipe of Qi et al. (arXiv 2510.26788), as in the write-up: 1. advantages
are vanilla GRPO's (TRL's), not Dr. GRPO's; 2. the loss is a mean over tokens, not divided by a
constant; 3. no truncated importance sampling; 4. trained on the sanity set, not on MATH-12k.
"""

import contextlib
import functools
import inspect
import io
import json
import logging
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from subprocess import DEVNULL, PIPE, Popen, run

import regex
import requests
import torch
import trackio
from accelerate.utils import broadcast_object_list
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi
from peft import LoraConfig
from transformers import AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

# What differs from Job to Job comes from launch.sh, which has the defaults: edit them there.
RUN = os.environ.get("RUN", "")  # names the directory in the bucket; the same name resumes
MODEL = os.environ.get("MODEL", "")
DATASET = os.environ.get("DATASET", "")  # its split train, see `training_example`
EVAL_DATASET = os.environ.get("EVAL_DATASET", "")  # its split test, see `held_out_example`; or none
MAX_STEPS = int(os.environ.get("MAX_STEPS") or 0)
MAX_STALENESS = int(os.environ.get("MAX_STALENESS") or 0)  # policies that a sample may lag behind
LORA_RANK = int(os.environ.get("LORA_RANK") or 0)
CONTEXT = int(os.environ.get("CONTEXT") or 0)  # tokens of prompt and completion in a replica
OUTPUT_DIR = Path(os.environ.get("MOUNT", ""), RUN)  # the same path in every Job
PROXY = f"http://127.0.0.1:{os.environ.get('PROXY_PORT', '')}"
NEEDED = "RUN MODEL DATASET MAX_STEPS MAX_STALENESS LORA_RANK CONTEXT MOUNT PROXY_PORT"

# The recipe is constants: the write-up's run 5. Edit them here.
LEARNING_RATE = 4e-5  # no schedule; ten times the usual rate of full fine-tuning
MAX_COMPLETION = 3000  # tokens; a prompt has the rest of CONTEXT
# Tokens packed into one row, at least CONTEXT; run 1: 0, one sample per row.
TOKEN_BUDGET = 16384
# Rows per GPU process per optimizer step, about 150 samples in all; run 1: 64.
ACCUMULATION = 6
GRADIENT_CHECKPOINTING = False  # runs 1 and 2: True
MAX_INFLIGHT = 384  # requests, 128 per replica; runs 1 to 4: 128
# Scored samples that may wait for the trainer; runs 1 to 4: 512.
QUEUE_SIZE = 768
SYNC_STEPS = 4  # optimizer steps per policy
SAVE_STEPS = 50  # optimizer steps per checkpoint
EVAL_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."


def say(text: str):
    """A line in one write: several processes share this output, and print() may write twice."""
    # The other GPU processes would say the same.
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"[train] {text}\n")
        sys.stdout.flush()


# ---- The reward

# A longer answer counts as wrong; ground truths in MATH stay below 200.
ANSWER_CHARS = 300
# Per comparison (0.01 to 0.2 s and 60 MB are normal); then its process ends: not equal.
SYMPY_SECONDS, SYMPY_BYTES = 4, 2 << 30
boxes = []  # whether each completion that this process has scored had a boxed answer


def boxed_answer_reward(tokenizer, eos, turn_ends, completion_ids, ground_truth, **_):
    r"""1 where a completion ended by itself and its last `\boxed{}` is the ground truth, else 0.

    TRL calls this in a thread of its rollout process, with the completions of one prompt and a list
    per column of the data set. What counts is what the policy generated: the token ids as vLLM
    returned them, up to the first end of a turn. A completion ended by itself if its last id is one
    of the model's EOS ids (`eos`); otherwise MAX_COMPLETION or the context cut it off. The first
    three arguments are bound by `load_tokenizer`.
    """
    rewards = []
    for ids, gold in zip(completion_ids, ground_truth, strict=True):
        end = next((i for i, token in enumerate(ids) if token in turn_ends), len(ids))
        answer = last_boxed(tokenizer.decode(ids[:end], skip_special_tokens=True))
        rewards.append(float(ids[-1:] != [] and ids[-1] in eos and answers_equal(gold, answer)))
        boxes.append(bool(answer))
    if 64 <= len(boxes) < 64 + len(rewards) and not any(boxes):
        say(r"no completion has a \boxed{} answer so far: do the prompts ask for one?")
    return rewards


def last_boxed(text: str) -> str:
    r"""Content of the last `\boxed{`; "" if there is none, or it does not close in ANSWER_CHARS."""
    last = text[max(text.rfind(r"\boxed"), 0) :][: ANSWER_CHARS + len(r"\boxed{}")]
    match = regex.match(r"\\boxed\s*\{((?:\\.|[^{}\\]|\{(?1)\})*+)\}", last, regex.DOTALL)
    return match[1] if match else ""


# What LaTeX may add to an answer without changing it; math-verify knows the rest.
LOOKS = [
    # \$5, 5\%, 5. are 5, as in MATH
    (r"\\?[$%]|°|\\(left|right)(?![a-z])|^\s+|\.?\s*$", ""),
    # \text{Evelyn}
    (r"(^|, *)\\(text(bf|it|rm)?|mathrm|mbox) ?\{([^{}\d]*)\}(?=,|$)", r"\1\4"),
    # Choice (C) is C.
    (r"^\(([A-Z])\)$", r"\1"),
]
UNIT = r"\\(text|mathrm|mbox)|\\\$"
NAME = r"[a-zA-Z](\([a-zA-Z]\))? *(=|\\in(?![a-z])) *"  # of x=5, x\in[0,1], f(x)=x+1
RELATIONS = r"(?<![<>!])=|\\in(?![a-z])", r"[<>]|!=|\\(le|ge|lt|gt|ne)q?(?![a-z])"
# What math-verify reads as something else: 101_2, 10:30, 1 1/2, 5 million (as 5), AB (as BA),
# 1,1,2 (as 1,2).
MISREAD = r"\d[_:]|\d \d|thousand|illion|^[a-zA-Z, ]*$|^(?![(\[\\])(.*,)?([^,]+),(.*,)?\2(,|$)"


@functools.lru_cache(maxsize=10_000)  # most completions of a prompt give the same few answers
def answers_equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers mean the same. In doubt they do not: never pay a wrong answer."""
    # 5 cm is 5, but not 5 m
    units = all(re.search(UNIT, text) for text in (gold, answer))
    pair = [gold, answer]
    for pattern, replacement in LOOKS:
        pair = [re.sub(pattern, replacement, text) for text in pair]
    if not all(re.search(RELATIONS[0], text) for text in pair):
        name = next(filter(None, (re.match(NAME, text) for text in pair)), [""])[0]
        # Here x=5 is 5; x=1, x=2 is 1, 2.
        pair = [text.replace(name, "") for text in pair]
    marks = [[bool(re.search(pattern, text)) for pattern in RELATIONS] for text in pair]
    lists = [(text.count(","), text[:1] + text[-1:] if text[:1] in "([" else "") for text in pair]
    return pair[0] == pair[1] != "" or not (
        units
        or any(re.search(MISREAD, text) for text in pair)
        # A is not a
        or pair[0].lower() == pair[1].lower()
        # 7=5 is not 5
        or marks[0] != marks[1]
        # (1,2) is not [1,2], 1,2
        or (lists[0] != lists[1] and all("," in text for text in pair))
        or not sympy_equal(*pair)
    )


def sympy_worker(seconds: int, max_bytes: int):
    r"""Answer each line `gold\tanswer` on stdin with `True` or `False`, until stdin is closed."""
    import signal
    import sys
    from resource import RLIMIT_AS, setrlimit

    # For the imports.
    signal.alarm(120)
    setrlimit(RLIMIT_AS, (max_bytes, max_bytes))
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.cache import clear_cache

    def answer(line: str):
        texts, latex = line.strip().split("\t"), [LatexExtractionConfig()]
        pair = [parse(f"${text}$", latex, "no_fallback", parsing_timeout=None) for text in texts]
        # By default 0.333333 is 1/3, and what differs by less than 1e-15 is equal.
        sys.stdout.write(f"{verify(*pair, 30, 10_000, timeout_seconds=None)}\n")
        signal.alarm(0)

    # The first use imports the rest of sympy.
    answer("x+y\ty+x")
    for line in sys.stdin:
        # Nobody handles SIGALRM: the kernel ends this process.
        signal.alarm(seconds)
        answer(line)
        # Else a large answer could starve those after it.
        clear_cache()


worker = None  # one: TRL scores a group at a time


def sympy_equal(gold: str, answer: str) -> bool:
    """Ask the worker process. No reply (it ran out of time or memory) means not equal.

    sympy cannot be interrupted in a thread, and TRL's rollout process is daemonic: multiprocessing
    refuses to start children in it. So the worker is a plain subprocess. It is given its function's
    source, not this file, whose imports (torch, TRL) would cost it seconds and a gigabyte.
    """
    global worker
    if worker is None or worker.poll() is not None:
        source = f"{inspect.getsource(sympy_worker)}sympy_worker({SYMPY_SECONDS}, {SYMPY_BYTES})"
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "text": True, "bufsize": 1}
        worker = Popen([sys.executable, "-u", "-c", source], **pipes)
        if worker.stdout.readline() != "True\n":
            raise RuntimeError("math-verify does not start: see python -c 'import math_verify'")
    worker.stdin.write("\t".join(" ".join(text.split()) for text in (gold, answer)) + "\n")
    reply = worker.stdout.readline()
    if not reply:
        worker.wait()
    return reply == "True\n"


# ---- The model and the data: what cannot be trained on is said before a replica is paid for


def load_tokenizer() -> tuple:
    """(tokenizer, reward) for MODEL; SystemExit with a line if it cannot be trained so.

    vLLM stops at the EOS ids of the tokenizer and of the generation config. A turn may end earlier,
    with what the chat template puts behind an answer: Qwen2.5-Math's EOS is <|endoftext|>, its
    turns end with <|im_end|>.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    eos = {tokenizer.eos_token_id}
    # Some models have no generation config.
    with contextlib.suppress(OSError):
        ids = GenerationConfig.from_pretrained(MODEL).eos_token_id
        eos |= set(ids) if isinstance(ids, list) else {ids}
    if eos == {None} or not tokenizer.chat_template:
        sys.exit(f"[train] {MODEL} has no EOS token or no chat template: set it here")
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    end_of_turn = tokenizer(render(turns).rpartition("ANSWER")[2], add_special_tokens=False)
    header = render(turns[:1], add_generation_prompt=True).removeprefix(render(turns[:1]))
    header or sys.exit(f"[train] {MODEL}: its chat template has no generation prompt: add one")
    # TRL knows some models' templates, for their tool calls. Here all after the header is content.
    fields = {"content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": header, "fields": fields}
    tokenizer.response_template["defaults"] = {"role": "assistant"}
    turn_ends = eos | set(end_of_turn["input_ids"][:1])
    return tokenizer, functools.partial(boxed_answer_reward, tokenizer, eos, turn_ends)


def training_example(row: dict) -> dict:
    """A row of DATASET as messages and the text that the reward compares with."""
    return {"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]}


def held_out_example(row: dict) -> dict:
    """A row of EVAL_DATASET, likewise."""
    prompt = [{"role": "user", "content": f"{row['problem']}\n{EVAL_PROMPT}"}]
    return {"prompt": prompt, "ground_truth": row["answer"]}


TYPES = [list, str], [list, int], [list, float]


def load(name: str, split: str, example, tokenizer) -> Dataset:
    """The data set as `example` reads it, with the token ids of its prompts, without those prompts
    that leave no room for MAX_COMPLETION; SystemExit with a line if it cannot be read so."""

    def tokenized(row):
        row = example(row)
        if [type(row["prompt"]), type(row["ground_truth"])] not in TYPES:
            raise TypeError(f"a list of messages and a text or number are needed, not {row}")
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        return row | {"ground_truth": str(row["ground_truth"]), "ids": ids}

    try:
        rows = load_dataset(name, split=split)
        rows = rows.map(tokenized, remove_columns=rows.column_names)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        sys.exit(f"[train] {example.__name__} cannot read {name}, split {split}: {error!r}")
    fit = rows.filter(lambda row: len(row["ids"]) <= CONTEXT - MAX_COMPLETION)
    say(f"{name}: {len(fit)} prompts; {len(rows) - len(fit)} leave no room for MAX_COMPLETION")
    return fit if len(fit) else sys.exit(f"[train] {name}: no prompt is left")


# ---- Checkpoints: a Job can die while it writes one


def newest_checkpoint() -> Path | None:
    """The newest checkpoint whose files are all there with the sizes that its manifest lists, or
    None. SystemExit with a line if this run cannot go on from it.

    Another one was being written when its trainer died. It is renamed, because its files must not
    mix with those of the same step, written again.
    """
    found = [path for path in OUTPUT_DIR.glob("checkpoint-*") if path.name[11:].isdecimal()]
    for path in sorted(found, key=number_of, reverse=True):
        if not (missing := missing_file(path)):
            return path
        aside = path.rename(OUTPUT_DIR / f"incomplete-{os.urandom(2).hex()}-{path.name}")
        say(f"skipped {path}: incomplete, {missing} is not there or cut short; now {aside.name}")


def missing_file(checkpoint: Path) -> str:
    """The name of a file that is not there, or not whole; "" if there is none."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
    except (FileNotFoundError, ValueError):
        return "manifest.json"
    if manifest["run"] != this_run():
        sys.exit(f"[train] {checkpoint} needs {manifest['run']}, not {this_run()}; or another RUN")
    sizes = sizes_of(checkpoint)
    return next((name for name, size in manifest["files"].items() if sizes.get(name) != size), "")


def sizes_of(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def this_run() -> dict:
    """What a checkpoint must fit to: it is read by as many GPU processes as wrote it."""
    ranks = os.environ.get("WORLD_SIZE") or os.environ.get("RANKS", "gpu")
    processes = torch.cuda.device_count() if ranks == "gpu" else int(ranks)
    return {"model": MODEL, "LoRA rank": LORA_RANK, "GPU processes": processes}


def number_of(path: Path) -> int:
    return int(re.search(r"\d+$", path.name)[0])


def highest_published_version() -> int:
    """Highest N of `.vllm_lora/trl-policy-vN` in this run's directory: numbering goes on after it,
    whatever the checkpoint says. vLLM keys its prefix cache by name: a name used twice would mix
    the weights of two policies."""
    return max(map(number_of, OUTPUT_DIR.glob(".vllm_lora/trl-policy-v*")), default=0)


# ---- Reading a run

READ = ("perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_s")
READ += ("sample/rollout_queue_size", "rollout/inflight", "sample/staleness_mean")


def column(history: list[dict], key: str) -> list:
    return [log[key] for log in history if log.get(key) is not None]


def figures(history: list[dict]) -> dict:
    """Medians of what TRL logged, one dict per step, and what they mean: `bottleneck`, `advice`."""
    seen = {f"{key.rpartition('/')[2]}_p50": median(column(history, key) or [0]) for key in READ}
    return seen | dict(zip(("bottleneck", "advice"), diagnose(**seen), strict=True))


def diagnose(step_s_p50, fwd_bwd_s_p50, rollout_wait_s_p50, weight_sync_s_p50, **seen) -> tuple:
    """(bottleneck, advice with the figures behind it), as the write-up reads a run."""
    step, synced = step_s_p50 or 1e9, weight_sync_s_p50 / SYNC_STEPS
    busy, wait, sync = (seconds / step for seconds in (fwd_bwd_s_p50, rollout_wait_s_p50, synced))
    queue, inflight = seen["rollout_queue_size_p50"], seen["inflight_p50"]
    facts = f"step {step_s_p50:.1f} s: fwd+bwd {busy:.0%}, wait {wait:.0%}, sync {sync:.0%}; "
    facts += f"queue {queue:.0f}/{QUEUE_SIZE}, in flight {inflight:.0f}/{MAX_INFLIGHT}"
    for applies, bottleneck, advice in (
        (not step_s_p50, "unknown", "one step is too short a run to read"),
        (wait > 0.1 and inflight > 0.97 * MAX_INFLIGHT, "in-flight-capped", "raise MAX_INFLIGHT"),
        (wait > 0.1, "generation-bound", "add a replica (REPLICAS)"),
        (sync > 0.15, "sync-bound", "see perf/weight_sync_*_s, or raise SYNC_STEPS"),
        (busy > 0.8 and not TOKEN_BUDGET, "trainer-bound", "set TOKEN_BUDGET=16384"),
        (busy > 0.8 and GRADIENT_CHECKPOINTING, "trainer-bound", "unset GRADIENT_CHECKPOINTING"),
        (busy > 0.8 and queue > 0.9 * QUEUE_SIZE, "trainer-bound", "more GPUs for the trainer"),
        (True, "balanced", "nothing to change: the trainer computes and rarely waits"),
    ):
        if applies:
            return bottleneck, f"{advice} ({facts})"


def attempt(what: str, function, *arguments, **options):
    """The function's result, or None and a line: what is not the training must not cost the run."""
    try:
        # Because trackio greets with six lines.
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*arguments, **options)
    except Exception as error:  # noqa: BLE001
        say(f"no {what}: {error!r}")


class RunCallback(TrainerCallback):
    """Continues the numbering of policies, opens the dashboard (one private Space for all runs, or
    one on this machine), says a line per step, and completes checkpoints."""

    def on_train_begin(self, args, state, control, **kwargs):
        # Runs before the trainer's own callback, which publishes the first policy.
        self.trainer.model_version = max(self.trainer.model_version, highest_published_version())
        if state.is_world_process_zero:
            # Taken out of the environment because trackio would try it again by itself.
            space = os.environ.pop("TRACKIO_SPACE_ID", None)
            init = functools.partial(trackio.init, "async-grpo-lora", name=RUN, resume="allow")
            if not (space and attempt("Space", init, space_id=space, private=True)):
                space = attempt("dashboard", init) and None
            say(f"dashboard: {space or 'on this machine, see README.md'}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "ratio" not in logs:
            return
        trackio.log(logs, step=state.global_step)
        recent = [log for log in state.log_history if "ratio" in log][-20:]
        step_s = median(column(recent, "perf/step_s") or [0])
        now = dict.fromkeys(READ, 0) | {key: value for key, value in logs.items() if value}
        say(
            f"step {state.global_step:>4}/{state.max_steps}  "
            f"left {step_s * (state.max_steps - state.global_step) / 60:5.1f} min  "
            f"reward {mean(column(recent, 'reward')):.3f}  ratio {now['ratio']:.4f}  "
            f"step {now['perf/step_s']:6.2f} s: fwd+bwd {now['perf/fwd_bwd_s']:.2f} "
            f"wait {now['perf/rollout_wait_s']:.2f} sync {now['perf/weight_sync_s']:.2f}  "
            f"queue {now['sample/rollout_queue_size']:4.0f}/{QUEUE_SIZE}  "
            f"in flight {now['rollout/inflight']:4.0f}/{MAX_INFLIGHT}  "
            f"staleness {now['sample/staleness_mean']:.1f}"
        )
        if state.global_step % 20 == 0:
            say("{bottleneck}: {advice}".format(**figures(recent)))

    def on_save(self, args, state, control, **kwargs):
        checkpoint = OUTPUT_DIR / f"checkpoint-{state.global_step}"
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model)
        # On a local disk first: TRL renames what it saves, and a mount may not read that soon.
        with tempfile.TemporaryDirectory() as scratch:
            # Every process takes part, because each has a shard.
            save_lora_adapter(model, accelerator, "default", f"{scratch}/adapter")
            # Until the shards of all are written.
            accelerator.wait_for_everyone()
            if not state.is_world_process_zero:
                return
            # Not shutil.copytree, which copies extended attributes: rclone's mounts refuse them.
            run(["cp", "-rT", f"{scratch}/adapter", checkpoint / "adapter"], check=True)
        sizes = sizes_of(checkpoint)
        (checkpoint / "manifest.json").write_text(json.dumps({"run": this_run(), "files": sizes}))
        say(f"checkpoint-{state.global_step} complete: {sum(sizes.values()) / 1e6:.1f} MB")


# ---- After the last step


def finish(reward, questions, checkpoint: Path):
    """final-adapter, then scoreboard.json, which each part that succeeds completes. All of it comes
    from the last checkpoint, so that a trainer that dies here goes on here."""
    adapter = OUTPUT_DIR / "final-adapter"
    run(["cp", "-rT", checkpoint / "adapter", adapter], check=True)
    board = {"model": MODEL, "dataset": DATASET, "adapter": str(adapter)}
    for what, part in (
        ("figures", lambda: whole_run(checkpoint)),
        ("routing", routing),
        ("held-out accuracy", lambda: accuracy(reward, questions, checkpoint) if questions else {}),
        ("cost", cost),
    ):
        board |= attempt(what, part) or {}
        (OUTPUT_DIR / "scoreboard.json").write_text(json.dumps(board, indent=1))
    say(f"final adapter {adapter}; {board.get('bottleneck')}: {board.get('advice')}")


def whole_run(checkpoint: Path) -> dict:
    """What TRL logged, from the first step on."""
    logs = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    history = [log for log in logs if "ratio" in log]
    board = figures(history)
    board["steps"], board["wall_s"] = len(history), sum(column(history, "perf/step_s"))
    rewards, ratios = column(history, "reward"), column(history, "ratio")
    board["reward_first"], board["reward_last"] = mean(rewards[:10]), mean(rewards[-10:])
    board["ratio_min"], board["ratio_max"] = min(ratios), max(ratios)
    syncs = column(history, "perf/weight_sync_s")
    board["syncs"], board["weight_sync_s_first"] = len(syncs), syncs[0]
    board["staleness_mean"] = mean(column(history, "sample/staleness_mean"))
    board["samples_trained"] = round(sum(column(history, "batch/samples_per_step")))
    return board


def routing() -> dict:
    stats = requests.get(f"{PROXY}/stats", timeout=10).json()
    return {"replicas": len(stats.pop("replicas")), "routing": stats}


def accuracy(reward, questions, checkpoint: Path) -> dict:
    """Greedy accuracy on EVAL_DATASET of the base model and of the final adapter, with 95 % Wilson
    intervals: the same replicas and the same reward as in training."""
    # A name that no policy has.
    final = f"final-step-{number_of(checkpoint)}"
    post("load_lora_adapter", lora_name=final, lora_path=str(OUTPUT_DIR / "final-adapter"))

    def ask(policy, ids):
        options = {"max_tokens": MAX_COMPLETION, "temperature": 0, "return_token_ids": True}
        answer = post("completions", model=policy, prompt=ids, **options)
        return answer.json()["choices"][0]["token_ids"]

    n, z, result = len(questions), 1.96, {"eval_questions": len(questions)}
    for label, policy in (("base", MODEL), ("trained", final)):
        with ThreadPoolExecutor(MAX_INFLIGHT) as pool:
            answers = list(pool.map(ask, [policy] * n, questions["ids"]))
        p = result[f"accuracy_{label}"] = mean(reward(answers, questions["ground_truth"]))
        middle, half = p + z * z / 2 / n, z * (p * (1 - p) / n + (z / n / 2) ** 2) ** 0.5
        ends = [(middle + half * sign) / (1 + z * z / n) for sign in (-1, 1)]
        result[f"accuracy_{label}_95"] = [round(end, 4) for end in ends]
    return result


def post(route: str, **body):
    response = requests.post(f"{PROXY}/v1/{route}", json=body, timeout=600)
    response.raise_for_status()
    return response


def cost() -> dict:
    """`cost_usd` of this run's Jobs so far, by their durations and the hardware's prices."""
    api = HfApi()
    hourly = {hardware.name: hardware.unit_cost_usd * 60 for hardware in api.list_jobs_hardware()}
    jobs = api.list_jobs(labels={"run": RUN}, namespace=os.environ.get("NAMESPACE") or None)
    seconds = [(hourly[job.flavor], job.durations and job.durations.running_secs) for job in jobs]
    return {"cost_usd": sum(price * (running or 0) / 3600 for price, running in seconds)}


# ---- The run


def main():
    if missing := [name for name in NEEDED.split() if not os.environ.get(name)]:
        sys.exit(f"[train] not set: {' '.join(missing)}. launch.sh sets them")
    tokenizer, reward = load_tokenizer()
    dataset = load(DATASET, "train", training_example, tokenizer).shuffle(seed=0)
    questions = load(EVAL_DATASET, "test", held_out_example, tokenizer) if EVAL_DATASET else None
    if sys.argv[1:] == ["check"]:
        return say(f"checkpoint to resume from: {newest_checkpoint()}")

    processes = this_run()["GPU processes"]
    # FSDP2: each process keeps its shard of the weights, and writes its shard of a checkpoint. The
    # weights stay gathered after the forward pass: 3 GB more memory, one all-gather less per row.
    fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": False}
    args = AsyncGRPOConfig(
        output_dir=str(OUTPUT_DIR),
        max_steps=MAX_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        # Completions per prompt.
        num_generations=8,
        max_completion_length=MAX_COMPLETION,
        token_budget=TOKEN_BUDGET,
        # Samples per row where TOKEN_BUDGET is 0.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=GRADIENT_CHECKPOINTING,
        bf16=torch.cuda.is_available(),
        weight_sync_steps=SYNC_STEPS,
        max_staleness=MAX_STALENESS,
        max_inflight_tasks=MAX_INFLIGHT,
        queue_maxsize=QUEUE_SIZE,
        vllm_server_base_url=PROXY,
        save_steps=SAVE_STEPS,
        fsdp=True if processes > 1 else None,
        fsdp_config=fsdp if processes > 1 else None,
        logging_steps=1,
        disable_tqdm=True,
        # As TRANSFORMERS_VERBOSITY says.
        log_level_replica="passive",
        # RunCallback opens the dashboard.
        report_to="none",
    )
    [checkpoint] = broadcast_object_list([None if args.process_index else newest_checkpoint()])
    say(f"{RUN}: {MODEL}, {MAX_STEPS} steps on {processes} GPU processes, output in {OUTPUT_DIR}")
    say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint to resume from: step 0")
    # Otherwise it died between its last checkpoint and its end.
    if not checkpoint or number_of(checkpoint) < MAX_STEPS:
        train(args, tokenizer, dataset, reward, checkpoint)
        # The last step is saved, too, whatever SAVE_STEPS.
        checkpoint = OUTPUT_DIR / f"checkpoint-{MAX_STEPS}"
    # The others have ended, or are about to: none waits for this.
    if args.process_index == 0:
        finish(reward, questions, checkpoint)


def train(args, tokenizer, dataset, reward, checkpoint: Path | None):
    # Alpha 2 is the paper's for rank 1; an update scales with alpha / rank.
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM")
    callback = RunCallback()
    options = {"train_dataset": dataset, "processing_class": tokenizer, "peft_config": lora}
    trainer = AsyncGRPOTrainer(MODEL, reward, args, callbacks=[callback], **options)
    callback.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    # At the end TRL kills its rollout process, which waits until its samples are taken, and warns.
    logging.getLogger("trl.experimental.async_grpo.async_rollout_worker").setLevel("ERROR")
    if args.process_index == 0 and trainer.weight_transfer is not None:
        sys.exit("[train] TRL would send merged weights, not the adapter: its warning says why")
    say("Adapter-only vLLM sync enabled")
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    attempt("end of the dashboard", trackio.finish)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
