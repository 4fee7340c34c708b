"""README.md keeps its promises: each command in it is run by a test or a bench, each file it names is there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

RUN_BY = {  # a pattern of commands in README.md: the file that runs them, and words of the call in it
    r"\./launch\.sh --local": ("tests/test_recipe.py", '"./launch.sh", "--local"'),
    r"BUCKET=me/lora \./launch\.sh --check": ("tests/test_launch.py", "--check"),
    r"BUCKET=me/lora \./launch\.sh --dry-run": ("tests/test_launch.py", "--dry-run"),
    r"BUCKET=me/lora RUN=first \./launch\.sh": ("tests/test_launch.py", "./launch.sh"),
    r"RUN=first \./launch\.sh --attach": ("tests/test_launch.py", "--attach"),
    r"RUN=first \./launch\.sh --stop": ("tests/test_launch.py", "--stop"),
    r"BIND=\S+ SEED=\d \./serve\.sh docker": ("tests/test_launch.py", "docker"),
    r"RUN=first REPLICA_URLS=\S+ \./launch\.sh trainer": ("tests/test_launch.py", "REPLICA_URLS"),
    r"TRACKIO_DIR=\S+ \S+/trackio show --project \S+": ("tests/test_recipe.py", 'venv/bin/trackio", "show"'),
}


def commands():
    blocks = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(?:gpu-\d)?\$ (.*?)(?: +#.*)?$", "\n".join(blocks), re.MULTILINE)
    assert len(found) >= 9
    return found


def test_every_command_is_run_by_a_test():
    for command in commands():
        matches = [where for pattern, where in RUN_BY.items() if re.fullmatch(pattern, command)]
        assert matches, f"README.md: no test is named for: {command}"
        file, call = matches[0]
        assert call in (ROOT / file).read_text(), f"{file} no longer runs {call}"


def test_every_figure_has_its_command():
    for script in re.findall(r"`python (bench/\w+\.py)", README):
        assert (ROOT / script).is_file(), f"README.md names {script}"
    assert {"bench/sync.py", "bench/routing.py", "bench/proxy.py", "bench/bucket.py", "bench/chaos.py"} <= set(
        re.findall(r"bench/\w+\.py", README)
    )
    assert "@" not in re.sub(r"`[^`]*`", "", README), "a table is still to be filled in"


def test_every_file_and_constant_it_names_is_there():
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), f"README.md links {target}"
    source = (ROOT / "train.py").read_text() + (ROOT / "launch.sh").read_text() + (ROOT / "serve.sh").read_text()
    for constant in re.findall(r"`([A-Z][A-Z_]{3,})(?: = |=)", README):
        assert constant in source, f"README.md names the constant {constant}"
