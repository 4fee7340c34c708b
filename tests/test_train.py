"""train.py without a run: the model, the data, checkpoints, numbering, reading the pipeline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from trl import chat_template_utils
from trl.chat_template_utils import parse_response

import train

ROOT = Path(__file__).parents[1]

# ---- Reading a run

MEDIANS = {"rollout_wait_s_p50": 0.0, "weight_sync_s_p50": 0.0, "rollout_queue_size_p50": 0}
MEDIANS |= {"inflight_p50": 0}


@pytest.mark.parametrize(
    ("seen", "constants", "bottleneck", "advice"),
    [
        # The write-up's five runs: what its authors read, and the constant that they changed next.
        (
            {"step_s": 22.9, "fwd_bwd_s": 21.9, "weight_sync_s": 8.5, "rollout_queue_size": 476},
            {"TOKEN_BUDGET": 0, "GRADIENT_CHECKPOINTING": True},
            "trainer-bound",
            "TOKEN_BUDGET",
        ),
        (
            {"step_s": 5.9, "fwd_bwd_s": 5.6},
            {"GRADIENT_CHECKPOINTING": True},
            "trainer-bound",
            "GRADIENT_CHECKPOINTING",
        ),
        # A sync of 7.6 s every four steps was a quarter of the wall clock: a step took 7.6 s.
        (
            {"step_s": 7.6, "fwd_bwd_s": 4.6, "weight_sync_s": 7.6, "rollout_wait_s": 1.1},
            {},
            "generation-bound",
            "REPLICAS",
        ),
        # The third replica idle, in flight stuck at 128.
        (
            {"step_s": 6.9, "fwd_bwd_s": 4.6, "rollout_wait_s": 0.8, "inflight": 128},
            {"MAX_INFLIGHT": 128},
            "in-flight-capped",
            "MAX_INFLIGHT",
        ),
        (
            {"step_s": 4.8, "fwd_bwd_s": 4.6, "weight_sync_s": 0.1, "inflight": 300},
            {},
            "balanced",
            "nothing",
        ),
        (
            {"step_s": 6.0, "fwd_bwd_s": 4.6, "weight_sync_s": 5.6},
            {},
            "sync-bound",
            "SYNC_STEPS",
        ),
        (
            {"step_s": 4.8, "fwd_bwd_s": 4.7, "rollout_queue_size": 765},
            {},
            "trainer-bound",
            "GPUs",
        ),
        ({"step_s": 0, "fwd_bwd_s": 0}, {}, "unknown", "too short"),
    ],
)
def test_the_bottleneck_is_named(monkeypatch, seen, constants, bottleneck, advice):
    for name, value in constants.items():
        monkeypatch.setattr(train, name, value)
    named = train.diagnose(**MEDIANS | {f"{name}_p50": value for name, value in seen.items()})
    assert named[0] == bottleneck and advice in named[1]
    assert f"step {seen['step_s']:.1f} s" in named[1]  # the figures behind it


# ---- Checkpoints


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "OUTPUT_DIR", tmp_path)
    monkeypatch.setenv("RANKS", "2")
    return tmp_path


FILES = {"model/.metadata": 10, "model/__0_0.distcp": 100, "trainer_state.json": 50}


def checkpoint(output, step):
    directory = output / f"checkpoint-{step}"
    for name, size in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x" * size)
    manifest = {"run": train.this_run(), "files": train.sizes_of(directory)}
    assert manifest["files"] == FILES
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_the_newest_complete_checkpoint_is_taken_by_number(output):
    for step in (50, 100, 950, 1000):
        checkpoint(output, step)
    assert train.newest_checkpoint() == output / "checkpoint-1000"


def test_other_directories_are_nobodys_business(output):
    checkpoint(output, 50)
    for name in ("checkpoint-50-merged", "checkpoint-", "my-checkpoint-900", "checkpoint-x"):
        (output / name).mkdir()
    assert train.newest_checkpoint() == output / "checkpoint-50"
    assert len(list(output.iterdir())) == 5


@pytest.mark.parametrize("damage", ["manifest.json", "model/.metadata", "trainer_state.json"])
def test_an_incomplete_checkpoint_is_put_aside_with_a_line(output, capsys, damage):
    checkpoint(output, 50)
    (checkpoint(output, 100) / damage).unlink()
    assert train.newest_checkpoint() == output / "checkpoint-50"
    assert f"skipped {output}/checkpoint-100: incomplete, {damage}" in capsys.readouterr().out
    assert not (output / "checkpoint-100").exists()  # nothing of it mixes with what is written next
    [aside] = output.glob("incomplete-*-checkpoint-100")
    assert len([path for path in aside.rglob("*") if path.is_file()]) == len(FILES)
    assert train.newest_checkpoint() == output / "checkpoint-50"


@pytest.mark.parametrize("damage", ["model/__0_0.distcp", "manifest.json"])
def test_a_file_cut_short_is_noticed(output, damage):
    path = checkpoint(output, 50) / damage
    path.write_bytes(path.read_bytes()[:-1])
    assert train.newest_checkpoint() is None


@pytest.mark.parametrize(
    ("name", "value"), [("MODEL", "another/model"), ("LORA_RANK", 8), ("RANKS", "1")]
)
def test_a_checkpoint_of_another_run_is_refused_in_a_line(output, monkeypatch, name, value):
    checkpoint(output, 50)
    if name == "RANKS":
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(train, name, value)
    with pytest.raises(SystemExit, match=f"checkpoint-50 needs .*, not .*{value}.*another RUN"):
        train.newest_checkpoint()
    assert (output / "checkpoint-50").exists()


def test_numbering_goes_on_after_the_highest_version_ever_published(output):
    assert train.highest_published_version() == 0
    for name in ("trl-policy-v9", "trl-policy-v10", ".trl-policy-v11.tmp"):  # the last never was
        (output / ".vllm_lora" / name).mkdir(parents=True)
    assert train.highest_published_version() == 10


# ---- The dashboard

BEGIN = """
import train
from types import SimpleNamespace
callback = train.RunCallback()
callback.trainer = SimpleNamespace(model_version=3)
callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=True), None)
train.trackio.log({"ratio": 1.0}, step=7)
train.trackio.finish()
"""


@pytest.mark.parametrize("space", ["", "me/async-grpo-lora"])
def test_a_space_that_is_refused_leaves_a_local_dashboard(tmp_path, space):
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path), "TRACKIO_SPACE_ID": space}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_secret", "RUN": "first"}
    command = [sys.executable, "-c", BEGIN]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert ("[train] no Space: " in done.stdout) == bool(space)
    assert "[train] dashboard: on this machine" in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr
    assert list(tmp_path.glob("async-grpo-lora*"))


def test_the_space_is_private_and_one_for_all_runs(output, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        train.trackio, "init", lambda *a, **options: calls.append((a, options)) or 1
    )
    monkeypatch.setenv("TRACKIO_SPACE_ID", "org/async-grpo-lora")
    callback = train.RunCallback()
    callback.trainer = SimpleNamespace(model_version=3)
    callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=True), None)
    [(arguments, options)] = calls
    assert arguments == ("async-grpo-lora",) and options["private"] is True
    assert options["space_id"] == "org/async-grpo-lora"
    assert "dashboard: org/async-grpo-lora" in capsys.readouterr().out


# ---- The end


def test_each_part_of_the_end_may_fail_alone(output, monkeypatch, capsys):
    def fail(*arguments):
        raise ConnectionError("503")

    adapter = checkpoint(output, 20) / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for part in ("whole_run", "routing", "cost"):
        monkeypatch.setattr(train, part, fail)
    monkeypatch.setattr(train, "accuracy", lambda *arguments: {"accuracy_trained": 0.5})
    train.finish(None, ["a question"], output / "checkpoint-20")
    board = json.loads((output / "scoreboard.json").read_text())
    assert board["accuracy_trained"] == 0.5 and "cost_usd" not in board
    assert (output / "final-adapter/adapter_config.json").read_text() == "{}"
    said = capsys.readouterr().out
    assert all(
        f"no {part}: ConnectionError('503')" in said for part in ("figures", "routing", "cost")
    )


@pytest.mark.parametrize("process", [0, 1])
def test_no_gpu_process_waits_while_the_first_one_asks_and_counts(output, monkeypatch, process):
    """The process group ends in `train`, so nobody is in a collective during `finish`."""
    done = []
    config = SimpleNamespace(process_index=process)
    rows = Dataset.from_list([{"ids": [1]}])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in train.NEEDED.split():
        monkeypatch.setenv(name, "1")
    for name, stub in {
        "load_tokenizer": lambda: (None, None),
        "load": lambda *arguments: rows,
        "AsyncGRPOConfig": lambda **options: config,
        "broadcast_object_list": lambda found: found,
        "train": lambda *arguments: done.append("train"),
        "finish": lambda *arguments: done.append("finish"),
    }.items():
        monkeypatch.setattr(train, name, stub)
    train.main()
    assert done == (["train", "finish"] if process == 0 else ["train"])


def test_an_error_that_is_not_the_buckets_is_told_as_what_it_is(monkeypatch, capsys):
    def fail(**options):
        raise TimeoutError("a library's")

    trainer = SimpleNamespace(weight_transfer=None, remove_callback=lambda kind: None, train=fail)
    monkeypatch.setattr(train, "AsyncGRPOTrainer", lambda *arguments, **options: trainer)
    monkeypatch.setattr(train, "LORA_RANK", 1)
    with pytest.raises(TimeoutError, match="a library's"):
        train.train(SimpleNamespace(process_index=0), None, None, None, None)
    assert "bucket" not in capsys.readouterr().out


# ---- The model


def tokenizer_of(directory, template, eos, specials):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = vars(chat_template_utils)
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
MODELS = {  # as on the Hub: template, tokenizer's EOS, special tokens, generation config's EOS
    "Qwen2.5-Math": (CHATML, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"], ["<|endoftext|>"]),
    "Qwen2.5-Instruct": (
        TEMPLATES["qwen2_5_chat_template"],
        "<|im_end|>",
        ["<|im_start|>", "<|endoftext|>"],
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "Qwen3": (
        TEMPLATES["qwen3_chat_template"],
        "<|im_end|>",
        ["<|im_start|>", "<|endoftext|>"],
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "Llama 3.2": (
        TEMPLATES["llama3_2_chat_template"],
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eom_id|>", *LLAMA[:3]],
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "Gemma 3": (TEMPLATES["gemma3_chat_template"], "<eos>", GEMMA, ["<eos>", "<end_of_turn>"]),
}
TURN_ENDS = {"Llama 3.2": "<|eot_id|>", "Gemma 3": "<end_of_turn>"}


@pytest.mark.parametrize("name", MODELS)
def test_models_by_their_tokenizers(tmp_path, monkeypatch, name):
    template, eos, specials, stops = MODELS[name]
    own = tokenizer_of(tmp_path, template, eos, specials)
    ids = own.convert_tokens_to_ids(stops)
    GenerationConfig(eos_token_id=ids if len(ids) > 1 else ids[0]).save_pretrained(tmp_path)
    monkeypatch.setattr(train, "MODEL", str(tmp_path))
    tokenizer, reward = train.load_tokenizer()
    end_of_turn = TURN_ENDS.get(name, "<|im_end|>")
    completions = [
        rf"A \boxed{{5}}.{end_of_turn}"
        + "\n" * (stop != end_of_turn)
        + stop * (stop != end_of_turn)
        for stop in stops
    ]
    completions += [rf"A \boxed{{5}}.{end_of_turn}" + "\nHuman: \\boxed{2}" + stops[0]]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
    assert reward(completion_ids=encoded, ground_truth=["5"] * len(encoded)) == [1.0] * len(encoded)
    cut_off = tokenizer(r"A \boxed{5}.", add_special_tokens=False)["input_ids"]
    assert reward(completion_ids=[cut_off], ground_truth=["5"]) == [0.0]
    # What TRL does with it: the template is recognised, and no text is lost.
    question = [{"role": "user", "content": "2+3=?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    message = parse_response(tokenizer, encoded[0], prefix=prompt)
    assert message["role"] == "assistant" and message["content"].startswith(r"A \boxed{5}.")
    assert "tool_calls" not in parse_response(tokenizer, cut_off, prefix=prompt)


def test_a_model_that_cannot_be_trained_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "MODEL", str(tmp_path))
    tokenizer_of(tmp_path, CHATML.partition("{% if add")[0], "<|endoftext|>", ["<|im_start|>"])
    with pytest.raises(SystemExit, match="has no generation prompt"):
        train.load_tokenizer()
    tokenizer_of(tmp_path, CHATML, None, ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(SystemExit, match="has no EOS token or no chat template"):
        train.load_tokenizer()
    tokenizer_of(tmp_path, None, "<|endoftext|>", [])
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="has no EOS token or no chat template"):
        train.load_tokenizer()


# ---- The data

TINY = ROOT / ".local/tiny"
ROW = {"prompt": [{"role": "user", "content": "1+1=?"}], "reward_model": {"ground_truth": "2"}}


def write(directory, split, rows):
    directory.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(directory / f"{split}.parquet")
    return str(directory)


def check(output, **changed):
    """What `train.py check` says, with the small model and its data."""
    names = (
        "RUN MOUNT MODEL DATASET EVAL_DATASET MAX_STEPS MAX_STALENESS LORA_RANK CONTEXT PROXY_PORT"
    )
    values = [
        "run",
        output,
        TINY / "model",
        TINY / "sums",
        TINY / "held-out-sums",
        20,
        4,
        1,
        4096,
        80,
    ]
    environment = dict(zip(names.split(), map(str, values), strict=True)) | {"RANKS": "2"}
    environment = os.environ | environment | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"} | changed
    command = [sys.executable, ROOT / "local/cpu_train.py", "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_check_says_what_can_be_trained(tmp_path):
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sums: 80 prompts; 0 leave no room" in done.stdout
    assert "held-out-sums: 20 prompts" in done.stdout
    assert "checkpoint to resume from: None" in done.stdout


def test_prompts_that_leave_no_room_are_dropped_with_a_line(tmp_path):
    long = ROW | {"prompt": [{"role": "user", "content": "1+1=?" * 1000}]}
    done = check(tmp_path, DATASET=write(tmp_path / "data", "train", [ROW, long, ROW]))
    assert done.returncode == 0, done.stderr
    assert "data: 2 prompts; 1 leave no room for MAX_COMPLETION" in done.stdout
    done = check(tmp_path, DATASET=write(tmp_path / "data", "train", [long]))
    assert done.returncode == 1 and "no prompt is left" in done.stderr


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (ROW | {"prompt": "1+1=?"}, "1+1=?"),
        (ROW | {"reward_model": {"ground_truth": ["2"]}}, "['2']"),
        ({"problem": "1+1=?", "reward_model": {"ground_truth": "2"}}, "'prompt'"),
        ({"prompt": ROW["prompt"], "answer": "2"}, "'reward_model'"),
    ],
)
def test_data_of_another_form_is_said_in_a_line(tmp_path, row, found):
    done = check(tmp_path, DATASET=write(tmp_path / "data", "train", [row]))
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("[train]")]
    assert "training_example cannot read" in line and found in line


def test_numbers_are_graded_as_text(tmp_path):
    rows = [ROW | {"reward_model": {"ground_truth": 2}}]
    questions = [{"problem": "1+1=?", "answer": 2}]
    data = write(tmp_path / "data", "train", rows)
    held_out = write(tmp_path / "held-out", "test", questions)
    done = check(tmp_path, DATASET=data, EVAL_DATASET=held_out)
    assert done.returncode == 0, done.stderr


def test_a_held_out_set_that_cannot_be_read_is_said_before_training(tmp_path):
    done = check(tmp_path, EVAL_DATASET=str(TINY / "sums"))  # it has no split test
    assert done.returncode == 1 and "held_out_example cannot read" in done.stderr
    done = check(tmp_path, EVAL_DATASET="")
    assert done.returncode == 0, done.stderr


def test_what_is_not_set_is_named(tmp_path):
    done = check(tmp_path, LORA_RANK="", CONTEXT="")
    assert done.returncode == 1 and "not set: LORA_RANK CONTEXT" in done.stderr
