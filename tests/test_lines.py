"""A line of the log is one write: trainer, proxy and launcher share one output, and print() writes
a line and its end in two calls where Python is unbuffered, as under torchrun. ruff forbids print()
(T20)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("module", ["proxy", "train", "chaos"])
def test_say_is_one_write(module, monkeypatch):
    writes = []

    class Output:
        write = staticmethod(writes.append)
        flush = staticmethod(lambda: None)

    say = __import__(module).say
    monkeypatch.setattr(sys, "stdout", Output)
    say("a line") if module != "chaos" else say("a line", Output)
    assert len(writes) == 1 and writes[0].endswith("a line\n")


def test_lines_of_many_writers_stay_whole(tmp_path):
    """Four unbuffered processes, eight threads each, on one pipe; with print() thousands of lines
    are torn."""
    program = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]); import proxy\n"
        "def talk(n): [proxy.say(f'{n} ' + 'x' * 60 + ' end') for _ in range(300)]\n"
        "threads = [threading.Thread(target=talk, args=(n,)) for n in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    read, write = os.pipe()
    talkers = [
        subprocess.Popen([sys.executable, "-u", "-c", program, ROOT], stdout=write)
        for _ in range(4)
    ]
    os.close(write)
    with os.fdopen(read) as lines:
        said = lines.read().splitlines()
    assert [talker.wait(30) for talker in talkers] == [0] * 4
    assert len(said) == 4 * 8 * 300 and {line[10:] for line in said} == {"x" * 60 + " end"}
