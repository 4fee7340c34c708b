"""local/install.sh with a stand-in for Python: what is whole stays, what is half is told and begun
again."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ("local/install.sh", "local/requirements.txt", "local/tiny_model.py", "requirements.txt")

# Stands for Python, for the one in the virtual environment and for its pip. The file `do` beside
# the tree says what pip does: "whole", "fail" or "hang". It is Python itself, because bash can
# forget a Ctrl-C that comes between two commands.
PYTHON = f"""#!{sys.executable} -I
import pathlib, shutil, sys, time

this = pathlib.Path(__file__).absolute()
tree = this.parents[3] if this.parent.name == "bin" else this.parent  # .local/venv/bin/python
do = (tree / "do").read_text()
match sys.argv[1:]:
    case ["-c", _]:
        sys.exit((tree / "too-old").exists())
    case ["-m", "venv", where]:
        (pathlib.Path(where) / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(this, where + "/bin/python")
    case ["-m", "pip", "install", *_]:
        print("Downloading torch-2.13.0-cp311.whl (180.2 MB)", flush=True)
        print("Downloading tqdm-4.whl (78 kB)", flush=True)
        if do == "hang":
            time.sleep(600)
        if do == "fail":
            sys.exit("ERROR: No space left on device")
        (this.parents[1] / "packages").touch()
    case ["-m", "pip", "uninstall", *_]:
        pass
    case ["local/tiny_model.py", where]:
        if do == "fail":
            sys.exit(1)
        pathlib.Path(where).mkdir(exist_ok=True)
        print("a model")
    case unexpected:
        sys.exit(f"unexpected: {{unexpected}}")
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "local").mkdir()
    for part in PARTS:
        shutil.copy(ROOT / part, tmp_path / part)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "do").write_text("whole")
    return tmp_path


def start(tree: pathlib.Path) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHON": str(tree / "python"),
        "PIP_USER": "1",
        "PYTHONPATH": "/nowhere",
    }
    return subprocess.Popen(
        ["bash", tree / "local/install.sh"], cwd="/", env=environment, text=True,
        start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def install(tree: pathlib.Path, code: int = 0) -> str:
    process = start(tree)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    return said


def whole(tree: pathlib.Path) -> bool:
    return (tree / ".local/venv/packages").exists() and (tree / ".local/tiny/made_by").exists()


def test_an_installation_is_told_by_its_big_parts_and_made_once(tree):
    said = install(tree)
    assert (
        "[local] torch-2.13.0-cp311.whl (180.2 MB)\n" in said
        and "tqdm" not in said
        and "a model" in said
    )
    assert whole(tree)
    assert install(tree) == ""
    with open(tree / "requirements.txt", "a") as pins:
        pins.write("another==1\n")
    assert "installing" in install(tree) and install(tree) == ""
    with open(tree / "local/tiny_model.py", "a") as source:
        source.write("# another model\n")
    said = install(tree)
    assert "a model" in said and "installing" not in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_installation_is_told_and_begun_again(tree, signum):
    (tree / "do").write_text("hang")
    process = start(tree)
    assert any("torch-2" in line for line in iter(process.stdout.readline, ""))
    # Ctrl-C reaches all of them
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    process.communicate(timeout=60)  # pip has ended as well, for it holds the output
    assert process.returncode != 0 and not whole(tree)
    (tree / ".local/venv/half").touch()
    (tree / "do").write_text("whole")
    assert "an installation was not finished: it is removed and begins again" in install(tree)
    assert whole(tree) and not (tree / ".local/venv/half").exists()


def test_a_failed_installation_shows_pips_error_and_is_begun_again(tree):
    (tree / "do").write_text("fail")
    said = install(tree, code=1)
    assert "ERROR: No space left on device" in said and "pip failed, as it says above" in said
    (tree / "do").write_text("whole")
    assert "was not finished" in install(tree) and whole(tree)


def test_a_model_that_was_not_made_is_made_at_the_next_start(tree):
    install(tree)
    shutil.rmtree(tree / ".local/tiny")
    (tree / "do").write_text("fail")
    install(tree, code=1)
    assert not (tree / ".local/tiny/made_by").exists()
    (tree / "do").write_text("whole")
    said = install(tree)
    assert "a model" in said and "installing" not in said and whole(tree)


def test_a_python_that_will_not_do_is_told(tree):
    (tree / "too-old").write_text("1")
    assert "is not a Python 3.11 to 3.14 with venv" in install(tree, code=1)


def test_two_installations_at_once_are_one_after_the_other(tree):
    (tree / "do").write_text("hang")
    first = start(tree)
    assert any("torch-2" in line for line in iter(first.stdout.readline, ""))
    second = start(tree)
    assert "another installation is at work" in second.stdout.readline()
    (tree / "do").write_text("whole")
    os.killpg(first.pid, signal.SIGKILL)
    said, _ = second.communicate(timeout=60)
    first.communicate(timeout=60)
    assert second.returncode == 0 and "begins again" in said and whole(tree)
