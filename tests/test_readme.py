"""The pages keep their promises: a test runs each command of README.md, and the files, options,
constants and log lines that README.md and bench/README.md name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "bench/README.md")}
SCRIPTS = ("train.py", "proxy.py", "serve.sh", "launch.sh", "bench/bucket.py", "bench/report.py")
SOURCE = "".join((ROOT / name).read_text() for name in SCRIPTS)

LAUNCH, RECIPE = "tests/test_launch.py", "tests/test_recipe.py"
SLURM, OWN = "tests/test_slurm.py", "tests/test_own_replicas.py"
JOBS = "tests/test_jobs_api.py"
RUN_BY = {  # a pattern of commands: the file that runs them, and words of the call there
    r"\./launch\.sh --local": (RECIPE, '"./launch.sh", "--local"'),
    r"BUCKET=me/lora \./launch\.sh --check": (LAUNCH, 'ground.launch("--check"'),
    r"BUCKET=me/lora \./launch\.sh --dry-run": (LAUNCH, '"launch.sh", "--dry-run", env=setting'),
    r"BUCKET=me/lora RUN=first \./launch\.sh": (LAUNCH, 'ground.launch(run="life"'),
    r"RUN=first \./launch\.sh --attach": (LAUNCH, '"launch.sh", "--attach"'),
    r"RUN=first \./launch\.sh --stop": (LAUNCH, '"launch.sh", "--stop"'),
    r"BIND=\S+ SEED=\d \./launch\.sh serve docker": (LAUNCH, 'SEED="1", BIND="10.0.0.11"'),
    r"REPLICA_URLS=\S+ RUN=first \./launch\.sh docker": (LAUNCH, '"launch.sh", "docker"]'),
    r"RUN=first MOUNT=\S+ sbatch slurm/run\.sbatch": (SLURM, '"slurm/run.sbatch"]'),
    r"hf buckets sync hf://\S+ first": (JOBS, '"buckets", "sync"'),
    r"vllm serve \S+ --enable-lora .* --lora-modules math=\S+": (OWN, 'readme("vllm serve"'),
    r"curl localhost:8000/v1/chat/completions .*\\": (OWN, 'readme("curl"'),
    r"hf upload me/math \S+": (OWN, 'readme("hf upload"'),
    r"TRACKIO_DIR=\S+ \S+/trackio show --project \S+": (RECIPE, 'venv/bin/trackio", "show"'),
}


def blocks(page):
    return re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def spans(page):
    """What stands in backticks outside of blocks."""
    text = re.sub(r"^```\w*\n.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def test_every_command_is_run_by_a_test():
    lines = "\n".join(text for page in PAGES.values() for text in blocks(page))
    commands = re.findall(r"^(?:gpu-\d)?\$ (.*?)(?: +#.*)?$", lines, re.MULTILINE)
    patterns = [
        next((p for p in RUN_BY if re.fullmatch(p, command)), command) for command in commands
    ]
    assert set(patterns) == set(RUN_BY)  # none without a test, and no test without its command
    for file, call in RUN_BY.values():
        assert call in (ROOT / file).read_text(), f"{file} no longer runs {call}"


@pytest.mark.parametrize("name", PAGES)
def test_every_script_and_option_is_there(name):
    for script, options in re.findall(r"`python (bench/\w+\.py)([^`]*)`", PAGES[name]):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[a-z-]+", options):
            assert f'"{option}"' in source, f"{name}: {script} takes no {option}"


def test_every_bench_has_its_table():
    named = set(re.findall(r"^`python (bench/\w+\.py)", PAGES["bench/README.md"], re.MULTILINE))
    assert named == {f"bench/{name}.py" for name in "routing proxy sync bucket chaos".split()}
    for name, page in PAGES.items():
        assert "@" not in page, f"{name}: a table is still to be filled in"


@pytest.mark.parametrize("name", PAGES)
def test_every_linked_file_and_heading_is_there(name):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", PAGES[name]):
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name} links {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^a-z0-9 -]", "", text.lower()) for text in headings]
            assert anchor in [text.replace(" ", "-") for text in anchors], f"{name}: #{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_every_constant_and_name_is_there(name):
    for span in spans(PAGES[name]):
        for constant in re.findall(r"\b[A-Z]+_[A-Z_]+\b", span):
            assert constant in SOURCE, f"{name} names {constant}"
        if re.fullmatch(r"[a-z]+(_[a-z]+)+", span):
            assert span in SOURCE, f"{name} names {span}"


def test_the_defaults_are_those_that_it_says():
    [run_5] = re.findall(r"^\| 5 \|(.*)$", PAGES["README.md"], re.MULTILINE)
    assert len(settings := re.findall(r"`([A-Z_]+ = \d+)`", run_5)) == 2
    save, slots = "SAVE_STEPS = 50", "MAX_STALENESS + 2"
    assert f"`{save}`" in PAGES["README.md"] and slots in PAGES["README.md"]
    for setting in (*settings, save):
        assert re.search(rf"^{setting}\b", (ROOT / "train.py").read_text(), re.MULTILINE), setting
    assert slots in (ROOT / "serve.sh").read_text()
    bench, proxy = PAGES["bench/README.md"], (ROOT / "proxy.py").read_text()
    for constant, value in re.findall(r"`([A-Z_]+)` = (\d+)", bench):
        assert re.search(rf"^{constant} = {value}\b", proxy, re.MULTILINE), constant
    # What a local run says there are $20 for, and a run $25.
    assert "[h200]=5 [h200x2]=10" in SOURCE and "REPLICAS:-3" in SOURCE


def test_every_line_of_the_log_is_still_said():
    """Each phrase of a quoted line is in a script, where names and numbers stand between them."""
    page = PAGES["README.md"]
    quoted = [line for text in blocks(page) for line in text.splitlines() if line[0:1] == "["]
    quoted += [span for span in spans(page) if re.match(r"\[(launch|proxy|train)\] ", span)]
    assert len(quoted) >= 10
    for line in quoted:
        text = re.sub(r"trl-policy|\S+\.py|\S*\d\S*|\bURL\b|[^\w ]", "|", line.partition("] ")[2])
        for phrase in text.split("|"):
            if words := re.findall(r"[A-Za-z]{2,}", phrase):
                pattern = r"\b" + r"\b.{,60}?\b".join(words) + r"\b"
                assert re.search(pattern, SOURCE, re.DOTALL), f"{phrase!r} of {line!r}"


@pytest.mark.parametrize("tool", ["rclone", "s3fs"])
def test_the_flags_of_mounts_are_the_measured_ones(tool):
    """bench/bucket.py's `robust` row, and tests/test_bucket.py, which mounts it."""
    from bucket import ROBUST

    lines = "\n".join(blocks(PAGES["README.md"])).splitlines()
    writer, reader = [line for line in lines if line.startswith(f"{tool} ")]
    flags = [set(re.findall(r"(?<= )-\S+", line)) for line in (writer, reader)]
    assert flags == [set(ROBUST[tool].writer), set(ROBUST[tool].reader)]


def test_the_newcomers_page_stays_short():
    page = PAGES["README.md"]
    assert len(page.splitlines()) <= 170 and len(page) <= 12_000
