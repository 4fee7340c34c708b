"""The recipe, real from end to end: `./launch.sh --local` with two vLLM replicas and two FSDP2 ranks (minutes)."""

import json
import os
import pathlib
import re
import subprocess
import threading

import pytest
import requests
import torch
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).parents[1]
LOCAL = ROOT / ".local"
STEPS = 48  # twelve syncs and the first

KEYS = """steps wall_s reward_first reward_last ratio_min ratio_max step_s_p50 fwd_bwd_s_p50 rollout_wait_s_p50
weight_sync_s_first weight_sync_s_p50 staleness_mean samples_trained routing replicas adapter bottleneck advice
accuracy_base accuracy_base_95 accuracy_trained accuracy_trained_95 eval_questions cost_usd""".split()


def processes_of(run: str) -> list[str]:
    """Command lines of processes, other than this one, that name the run in their environment."""
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (directory / "environ").read_bytes(), (directory / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked, or it is not ours
        if f"RUN={run}".encode() in environment.split(b"\0"):
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.fixture(scope="module")
def run():
    """(output of the launcher, the run's directory in the bucket)."""
    name = f"test-{os.getpid()}"
    environment = os.environ | {"RUN": name, "MAX_STEPS": str(STEPS), "HF_HUB_OFFLINE": "1"}  # as many have it set
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    done = subprocess.run(
        ["./launch.sh", "--local"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert after.stdout == before.stdout, "the run left files in the working tree"
    assert not processes_of(name), "the run left processes behind"
    return done.stdout, LOCAL / "buckets/local/lora" / name


@pytest.fixture(scope="module")
def board(run):
    return json.loads((run[1] / "scoreboard.json").read_text())


def test_only_the_adapter_is_synced(run):
    output, _ = run
    assert "Adapter-only vLLM sync enabled" in output
    policies = re.findall(r"\[proxy\] trl-policy-v(\d+) on 2/2 replicas", output)
    assert len(set(policies)) >= 12
    assert "merged" not in output


def test_it_learns_and_every_step_is_on_policy(board):
    assert board.keys() >= set(KEYS)
    assert board["steps"] == STEPS and board["replicas"] == 2 and board["syncs"] >= 12
    assert board["reward_last"] - board["reward_first"] >= 0.2
    assert 0.98 <= board["ratio_min"] <= board["ratio_max"] <= 1.02
    assert board["accuracy_trained"] > board["accuracy_base"]
    assert board["accuracy_trained_95"][0] <= board["accuracy_trained"] <= board["accuracy_trained_95"][1]


def test_nothing_was_retried_or_lost(board):
    routing = board["routing"]
    assert routing["retried"] == routing["ejected"] == routing["aborted"] == 0
    assert routing["affinity"] + routing["spilled"] + routing["unmatched"] == routing["routed"] > 0


def test_a_line_a_step_the_table_and_the_picture(run):
    output, directory = run
    steps = re.findall(rf"^\[train\] step +(\d+)/{STEPS} .* ratio [01]\.\d{{4}} .* tok/s$", output, re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, STEPS + 1))
    assert re.search(r"^reward_last +0\.\d+ +0\.438 +0\.416$", output, re.MULTILINE)
    assert (directory / "scoreboard.png").read_bytes().startswith(b"\x89PNG")


def test_the_token_is_never_shown(run):
    output, directory = run
    logs = [path.read_bytes() for path in (LOCAL / directory.name / "jobs").glob("*/log")]
    assert len(logs) == 3
    assert not any(b"hf_local" in text for text in [*logs, output.encode()])


def test_the_final_adapter_loads_in_peft_and_beats_the_base_model(run):
    tokenizer = AutoTokenizer.from_pretrained(LOCAL / "tiny/model")
    base = AutoModelForCausalLM.from_pretrained(LOCAL / "tiny/model")
    rows = load_dataset(str(LOCAL / "tiny/held-out-sums"), split="test")

    def accuracy(model):
        right = 0
        for row in rows:
            question = [{"role": "user", "content": f"{row['problem']} Answer in \\boxed{{}}."}]
            ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            reply = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
            right += f"\\boxed{{{row['answer']}}}" in tokenizer.decode(reply[0, ids.shape[1] :])
        return right / len(rows)

    torch.manual_seed(0)
    before = accuracy(base)
    assert accuracy(PeftModel.from_pretrained(base, run[1] / "final-adapter")) > before


def test_the_dashboard_opens(run):
    """README's one command: `trackio show --project async-grpo-lora`."""
    command = [LOCAL / "venv/bin/trackio", "show", "--project", "async-grpo-lora"]
    environment = os.environ | {"TRACKIO_DIR": str(LOCAL / "trackio"), "BROWSER": "true", "PYTHONUNBUFFERED": "1"}
    dashboard = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = threading.Timer(90, dashboard.kill)
    deadline.start()
    try:
        lines = iter(dashboard.stdout.readline, "")
        url = next(match[1] for line in lines if (match := re.search(r"launched at: (http://[^/\s]+)", line)))
        assert requests.get(url, timeout=30).status_code == 200
    finally:
        deadline.cancel()
        dashboard.terminate()
        dashboard.wait(timeout=30)
