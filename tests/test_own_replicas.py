"""Machines that are not Jobs, real from end to end: two replicas of `serve.sh here` that ask for a
key, and `launch.sh trainer` with REPLICA_URLS; then what README.md does with the result (four
minutes)."""

import base64
import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import threading
import time
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from chaos import free_port, replica_here
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).parents[1]
LOCAL = ROOT / ".local"
KEY = "a-key-of-my-own"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """URLs of two real replicas that answer, and ask for the key."""
    logs = tmp_path_factory.mktemp("replicas")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                replica_here(logs / f"replica-{seed}.log", SEED=seed, VLLM_API_KEY=KEY)
            )
            for seed in ("1", "2")
        ]


def trainer(replicas, run, mount, scratch, **changed):
    """(command, environment) of `launch.sh trainer` with those replicas."""
    path = f"{LOCAL / 'venv/bin'}:{os.environ['PATH']}"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JOB_ID", "HF_TOKEN")
    }
    environment |= {"PATH": path, "RUN": run, "MOUNT": str(mount), "MAX_STEPS": "6", "RANKS": "2"}
    environment |= {
        "REPLICA_URLS": ",".join(replicas),
        "VLLM_API_KEY": KEY,
        "PROXY_PORT": str(free_port()),
    }
    environment |= {
        "MODEL": str(LOCAL / "tiny/model"),
        "DATASET": str(LOCAL / "tiny/sums"),
        "EVAL_DATASET": "",
    }
    environment |= {
        "TRAIN_SCRIPT": "local/cpu_train.py",
        "TRACKIO_DIR": str(scratch / "trackio"),
        "POLL_S": "2",
    }
    return ["./launch.sh", "trainer"], environment | changed


@pytest.fixture(scope="module")
def trained(replicas, tmp_path_factory):
    """(what the trainer said, the run's directory)"""
    mount = tmp_path_factory.mktemp("bucket")
    command, environment = trainer(replicas, "own", mount, mount)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr, mount / "own"


def test_the_trainer_runs_with_replicas_of_ones_own(replicas, trained):
    asked = [requests.get(f"{url}/v1/models", timeout=30).status_code for url in replicas]
    said, directory = trained
    assert asked == [401, 401] and KEY not in said
    board = json.loads((directory / "scoreboard.json").read_text())
    assert board["steps"] == 6 and board["replicas"] == 2 and board["routing"]["ejected"] == 0
    assert (directory / "final-adapter/adapter_model.safetensors").is_file()


README = (ROOT / "README.md").read_text().partition("## Use the result")[2].partition("\n## ")[0]
QUESTION = "3+4=?\nAnswer in \\boxed{}."  # README's
README_NAMES = {"model": "Qwen/Qwen2.5-Math-1.5B", "run": "first/", "server": "localhost:8000"}


def readme(begins: str, **instead: str) -> list[str]:
    """The words of README's command that begins so, with this machine's names in place of its."""
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*?)(?: +#.*)?$", README, re.MULTILINE)
    [command] = [command for command in commands if command.startswith(begins)]
    for name, value in instead.items():
        assert README_NAMES[name] in command
        command = command.replace(README_NAMES[name], value)
    return [word for word in shlex.split(command) if word != "\n"]


def greedy(url, model, prompt, key=""):
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_result_answers_alike_wherever_it_is_used(replicas, trained, tmp_path, monkeypatch):
    """README's lines: stock vLLM, PEFT and the merged model say what a replica said."""
    run, model = trained[1], LOCAL / "tiny/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset(str(LOCAL / "tiny/held-out-sums"), split="test").select(range(4))
    questions = [f"{row['problem']}\nAnswer in \\boxed{{}}." for row in rows] + [QUESTION]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    order = {"lora_name": "result", "lora_path": str(run / "final-adapter")}
    bearer = {"Authorization": f"Bearer {KEY}"}
    url = f"{replicas[0]}/v1/load_lora_adapter"
    requests.post(url, json=order, headers=bearer, timeout=60).raise_for_status()
    said = [greedy(replicas[0], "result", prompt, KEY) for prompt in prompts]
    assert all("\\boxed{" in text for text in said)

    serve = readme("vllm serve", model=str(model), run=f"{run}/")
    with replica_here(tmp_path / "stock.log", *serve) as url:
        assert [greedy(url, "math", prompt) for prompt in prompts] == said
        ask = readme("curl", server=url.removeprefix("http://"))
        answer = json.loads(subprocess.check_output([*ask, "--silent"], text=True, timeout=300))
    assert answer["choices"][0]["message"]["content"] == said[-1]

    monkeypatch.chdir(tmp_path)
    pathlib.Path("first").symlink_to(run)
    [source] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(source.replace(README_NAMES["model"], str(model)))
    assert f"assistant\n{said[-1]}" in re.sub(r"<\|\w+\|>", "", out.getvalue())
    for used in (
        AutoPeftModelForCausalLM.from_pretrained("first/final-adapter"),
        AutoModelForCausalLM.from_pretrained("math-merged"),
    ):
        answers = []
        for prompt in prompts:
            reply = used.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
            )
            text = tokenizer.decode(reply[0, len(prompt) :], skip_special_tokens=True)
            answers.append(text)
        assert answers == said


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as `hf upload` asks for; keeps the files of commits."""

    committed: typing.ClassVar[dict[str, bytes]] = {}

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = f"http://{self.headers['Host']}/me/math"
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [plain | {"path": name} for name in names]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = line["value"]
                    self.committed[file["path"]] = base64.b64decode(file["content"])
            answer = {"commitUrl": f"{url}/commit/1", "commitOid": "1", "success": True}
        else:
            answer = {"url": url, "id": "me/math", "name": "me/math"}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *_):
        pass


def test_the_result_is_published_with_its_model_card(trained):
    adapter = trained[1] / "final-adapter"
    report = [LOCAL / "venv/bin/python", ROOT / "bench/report.py", trained[1]]
    subprocess.run(report, check=True, capture_output=True, timeout=300)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = os.environ | {"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
        environment["PATH"] = f"{LOCAL / 'venv/bin'}:{os.environ['PATH']}"
        command = readme("hf upload", run=f"{trained[1]}/")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        hub.shutdown()
    assert done.returncode == 0 and "/me/math/commit/" in done.stdout, done.stdout + done.stderr
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    assert Hub.committed == files
    card = files["README.md"].decode()
    assert "library_name: peft" in card and '"reward_last": ' in card and '"steps": 6' in card
    assert "Asynchronous GRPO with a rank-1 LoRA" in card


@pytest.fixture
def small_bucket(tmp_path):
    """A directory that takes 16 MB, as the bucket."""
    mount = tmp_path / "bucket"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "bucket", mount], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"NO TEST OF A FULL BUCKET HERE, for nothing can be mounted: {made.stderr}")
    yield mount
    # the replicas have its adapters mapped
    subprocess.run(["umount", "--lazy", mount], check=True, timeout=30)


def test_a_bucket_that_refuses_a_save_stops_the_training_and_keeps_the_checkpoints(
    replicas, small_bucket, tmp_path
):
    output, log = small_bucket / "full", tmp_path / "log"
    command, environment = trainer(
        replicas, "full", small_bucket, tmp_path, MAX_STEPS="400", SAVE_STEPS="4"
    )
    with open(log, "w") as out:
        launch = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 300
        while not list(output.glob("checkpoint-*/manifest.json")):
            assert launch.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        with (
            open(small_bucket / "somebody-elses", "wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(4096))
        assert launch.wait(timeout=300) != 0
    finally:
        launch.terminate()
        launch.wait(timeout=60)
    said = log.read_text()
    assert "No space left on device" in said, said[-3000:]
    assert "[launch] local/cpu_train.py failed, as it says above; RUN=full resumes" in said
    whole = {path.parent for path in output.glob("checkpoint-*/manifest.json")}
    assert whole and all(
        (checkpoint / name).stat().st_size == size
        for checkpoint in whole
        for name, size in json.loads((checkpoint / "manifest.json").read_text())["files"].items()
    )
