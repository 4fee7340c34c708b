"""The boxed-answer reward: which answers count as equal, and that no answer can stall, starve or outlive a run.

Run: pytest tests/test_reward.py (about a minute, most of it spent on answers that must run into the time limit).
"""

import asyncio
import functools
import itertools
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import train

EOS = 7
CUT_OFF = 8  # any token but EOS

EQUAL = [  # (ground truth, answer)
    # fractions
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\tfrac12"),
    (r"\frac{3}{56}", r"\frac3{56}"),
    (r"\frac{14}{3}", r"\frac{14}3"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"-\frac{1}{2}", r"-1/2"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"2\frac{1}{2}", r"\frac{5}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\frac{3\sqrt{3}}{4}", r"\dfrac{3 \sqrt 3}{4}"),
    # decimals, thousands, money, percent, degrees, scientific notation
    (".5", "0.5"),
    ("0.50", "0.5"),
    ("5", "5."),
    ("5", "$5$"),
    ("-5", "- 5"),
    ("1{,}657", "1657"),
    ("1,657", "1657"),
    (r"10,\!236", "10236"),
    (r"1\,000\,000", "1,000,000"),
    (r"\$18.90", "18.90"),
    (r"\$18.90", r"18.9\text{ dollars}"),
    (r"10\%", "10"),
    ("10", r"10 \%"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    (r"90^\circ", "90°"),
    (r"120^\circ", r"120\text{ degrees}"),
    (r"1.5 \times 10^{3}", "1500"),
    (r"6.02\times10^{23}", r"6.02 \times 10^{23}"),
    (r"2^{10}", "1024"),
    ("5!", "120"),
    # units, text, names
    (r"10\text{ cm}", "10"),
    ("10", r"10\text{ cm}^2"),
    (r"10\mbox{ inches}", "10"),
    (r"12\pi\text{ cm}^3", r"12\pi \mathrm{cm}^{3}"),
    (r"10\text{ a.m.}", r"10 \text{ am}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\mathrm{Evelyn}"),
    (r"\text{even}", r"\textbf{Even}"),
    (r"\text{(C)}", "C"),
    ("C", "(C)"),
    ("A, C", r"\text{A}, \text{C}"),
    (r"\text{no solution}", r"\text{No solution}"),
    (r"\text{Sam and Bob}", r"\text{Sam and Bob}"),
    ("2516_8", "2516_{8}"),
    # equations
    ("5", "x=5"),
    ("x = 5", "5"),
    ("y = 2x + 3", "2x+3"),
    ("y = 2x + 3", "y = 3 + 2x"),
    ("x+1", "f(x) = x+1"),
    ("2x-y=3", "y=2x-3"),
    ("1,2", r"x = 1 \text{ or } x = 2"),
    (r"[0,1]", r"x \in [0,1]"),
    (r"x \le 3", r"x \leq 3"),
    # expressions
    ("x^2+2x+1", "x^{2} + 2x + 1"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2x^2-8", "2(x-2)(x+2)"),
    (r"4\pi r^2", r"4 \pi r^{2}"),
    (r"4\pi r^2", r"4r^2\pi"),
    (r"\sqrt{2}", r"\sqrt2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt[3]{8}", "2"),
    (r"\frac{\pi}{3}", r"\dfrac{1}{3}\pi"),
    (r"3+2i", "2i+3"),
    (r"\left(\frac{1}{2}\right)^n", r"\left( \frac12 \right)^{n}"),
    (r"\binom{5}{2}", "10"),
    # lists, sets, tuples, intervals, matrices
    ("1,2", "2, 1"),
    (r"\{1,2\}", r"\left\{1, 2\right\}"),
    ("1,-2", r"\{-2,1\}"),
    ("6,7,8", r"6, 7 \text{ and } 8"),
    ("6,7,8", "6, 7, and 8"),
    (r"\pm 2", "2,-2"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("(2,1)", r"\left( 2, 1 \right)"),
    (r"[0,1)", r"\left[0,1\right)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1/2&0\\0&1\end{pmatrix}", r"\begin{bmatrix}0.5&0\\0&1\end{bmatrix}"),
    (r"\emptyset", r"\{\}"),
]

UNEQUAL = [  # neither may pass for the other
    ("5", "7"),
    ("0.5", "5"),
    ("5", "-5"),
    ("5", ""),
    ("5", r"\%"),
    ("5", r"\{\}"),
    ("12", "1,2"),
    ("1657", "1, 657"),
    ("1,657", "1.657"),
    ("2,300", r"2,\,300"),
    ("12345678901234567890", "12345678901234567891"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\frac{3}{2}", "1 1/2 1"),
    (r"\frac{11}{2}", "1 1/2"),
    ("1", "1 1/2"),
    (r"2\frac{1}{2}", "1"),
    (r"\pi", "3.14"),
    (r"\pi", "3.14159265"),
    ("11", "5 6"),
    # lists, tuples, intervals, matrices
    ("(1,2)", "(2,1)"),
    ("(1,2)", "1,2"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "(0,1)"),
    ("[0,1)", "[0,1]"),
    ("(3,1)", "[3,1]"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2", "1,2,3"),
    ("1,2", "1,2,2"),
    ("1,1,2", "1,2,2"),
    ("10", "10,10"),
    ("10", "(10,10)"),
    (r"\frac{\sqrt{3}}{3}", "0.577350"),
    ("1,2", "x=2,y=1"),
    ("(1,2),(3,4)", "(1,3),(2,4)"),
    (r"\pm 2", "2"),
    ("1<x<2", "1,2"),
    ("1<x<2", "x=1,y=2"),
    (r"(-\infty,2)", r"(-\infty,2]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)\cup[3,\infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    # equations: something that happens to end in the right number is no answer
    ("x=5", "y=5"),
    ("5", "7=5"),
    ("0", "x^2+3x-10=0"),
    ("y=2x+3", "y=3x+2"),
    (r"x\le 3", "x<3"),
    (r"x\le 3", r"x\ge 3"),
    (r"x\ne 2", "x=2"),
    # expressions
    ("x", "X"),
    ("2A", "2a"),
    ("x+1", "x-1"),
    ("x-y", "y-x"),
    ("(x+1)^2", "x^2+1"),
    (r"\frac{1}{2x}", r"\frac{x}{2}"),
    (r"\sqrt{2}", "2"),
    (r"\sqrt{12}", r"\sqrt12"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"),
    ("3+2i", "3-2i"),
    (r"1.5\times10^3", r"1.5\times10^{-3}"),
    (r"2^{10}", "210"),
    ("x_1", "x_2"),
    # words, bases, times, units
    ("ABCD", "CABD"),
    ("A,B", "B,A"),
    (r"\text{Evelyn}", r"\text{Bob}"),
    (r"\text{even}", r"\text{odd}"),
    ("101_2", "101_3"),
    ("101_2", "101"),
    ("101_2", "5"),
    (r"10\text{ a.m.}", r"10\text{ p.m.}"),
    ("10:30", "10:45"),
    ("10:30", r"\frac{1}{3}"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"\$50", r"50\text{ cents}"),
    (r"5\text{ million}", "5"),
    (r"10\%", "0.1"),
    (r"\text{June 20}", r"\text{June 21}"),
]

ENDLESS = [  # answers on which sympy would run for hours, or out of memory
    r"9^{9^{9^{9}}}",
    r"\binom{10^9}{10^8}",
    r"(((x+1)^{99999}+1)^{99999}+1)^{99999}",
    "100000000!",
    "(" * 140 + "1" + ")" * 140,
]
HUGE = ["{" * 10**6 + "5" + "}" * 10**6, "{" * 10**6 + "5", r"\boxed{" * 10**5, "1" * 100_000, "x+" * 140 + "x"]


def reward(*answers: str, gold: str, last_token: int = EOS) -> list[float]:
    """Rewards of completions that end in these boxed answers, called as TRL does."""
    return train.boxed_answer_reward(
        completions=[[{"role": "assistant", "content": rf"The answer is \boxed{{{answer}}}."}] for answer in answers],
        prompts=[[{"role": "user", "content": "How much is it?"}]] * len(answers),
        completion_ids=[[1, 2, last_token]] * len(answers),
        ground_truth=[gold] * len(answers),
        data_source=["MATH"] * len(answers),
        eos_token_id=EOS,
    )


def children(pid: int) -> set[int]:
    """Running child processes of a process."""
    found = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


def running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(autouse=True)
def forget_verdicts():
    train.answers_equal.cache_clear()


fresh_sum = itertools.count(1000)


def assert_sympy_still_right():
    n = next(fresh_sum)  # never seen before, so that no cache answers
    assert reward(f"x+{n}+1", f"x+{n}+2", gold=f"{n + 1}+x") == [1.0, 0.0]


# --- equal or not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert reward(answer, gold=gold) == [1.0]


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal(gold, answer):
    assert reward(answer, gold=gold) == [0.0]
    assert reward(gold, gold=answer or "0") == [0.0]


@pytest.mark.parametrize("answer", sorted({answer for pair in EQUAL + UNEQUAL for answer in pair if answer}))
def test_an_answer_equals_itself(answer):
    assert reward(answer, f" {answer} ", gold=answer) == [1.0, 1.0]


def test_most_answers_never_reach_sympy(monkeypatch):
    monkeypatch.setattr(train, "sympy_equal", lambda *pair: pytest.fail(f"asked sympy about {pair}"))
    assert reward("7", "0.5", r"\dfrac12", "1{,}657", r"5\text{ cm}", "x = 5", gold="5") == [0, 0, 0, 0, 1, 1]
    assert reward(r"\left(x + 1\right)^{2}", gold="(x+1)^2") == [1]
    assert reward("Bob", "7", "x", gold=r"\text{Evelyn}") == [0, 0, 0]
    assert reward("9" * 301, gold="x") == [0]


# --- finding the answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}, no: \boxed{4}.", "4"),
        (r"It is \boxed{5}, which is what we wanted to show, QED.", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ x \mid x > 0 \right.}", r"\left\{ x \mid x > 0 \right."),  # an escaped brace opens nothing
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed {5}", "5"),
        (r"\boxed{x=\boxed{5}}", "5"),
        (r"\boxed{3} and then \boxed{4", ""),  # cut short: the 3 is not its last answer
        (r"\boxed{\frac{1}{2}", ""),
        (r"\boxed{}", ""),
        ("The answer is 5.", ""),
        (r"\boxed 5 or \fbox{5}", ""),  # the prompt asks for \boxed{}
        ("", ""),
        (r"\boxed{" + "1" * 300 + "}", "1" * 300),
        (r"\boxed{" + "1" * 301 + "}", ""),
    ],
)
def test_last_boxed(text, answer):
    assert train.last_boxed(text) == answer


def test_a_completion_that_was_cut_off_scores_nothing():
    assert reward("5", gold="5") == [1.0]
    assert reward("5", gold="5", last_token=CUT_OFF) == [0.0]
    no_tokens = {"completions": [[{"content": r"\boxed{5}"}]], "completion_ids": [[]], "ground_truth": ["5"]}
    assert train.boxed_answer_reward(**no_tokens, eos_token_id=EOS) == [0.0]


def test_each_completion_is_scored_against_its_own_ground_truth():
    completions = [[{"content": rf"\boxed{{{answer}}}"}] for answer in ("1", "2", "3")]
    arguments = {"completions": completions, "completion_ids": [[EOS], [CUT_OFF], [EOS]], "eos_token_id": EOS}
    assert train.boxed_answer_reward(**arguments, ground_truth=["1", "2", "4"]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError):
        train.boxed_answer_reward(**arguments, ground_truth=["1"])


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ENDLESS + HUGE, ids=lambda answer: answer[:25])
def test_no_answer_stalls_scoring(answer):
    assert_sympy_still_right()  # starts the worker: the bound is for the answer
    start = time.monotonic()
    assert reward(*[answer] * 8, gold=r"\frac{\sqrt{3}}{2}") == [0.0] * 8  # a group waits once
    assert time.monotonic() - start < 5
    assert_sympy_still_right()


def test_workers_are_reused_and_limited():
    assert_sympy_still_right()
    before = children(os.getpid())
    for _ in range(5):
        assert_sympy_still_right()
    assert children(os.getpid()) == before
    for worker in before:
        limits = pathlib.Path(f"/proc/{worker}/limits").read_text()
        assert f"Max address space {train.SYMPY_BYTES}" in " ".join(limits.split())


def test_a_worker_that_grew_large_is_replaced(monkeypatch):
    assert_sympy_still_right()
    before = children(os.getpid())
    monkeypatch.setattr(train, "SYMPY_BYTES", 1)  # whatever it uses is too much
    for _ in before:
        assert_sympy_still_right()
    assert not children(os.getpid()) & before


def test_a_worker_killed_while_idle_is_replaced():
    assert_sympy_still_right()
    for worker in children(os.getpid()):
        os.kill(worker, signal.SIGKILL)
        while running(worker):
            time.sleep(0.01)
    assert_sympy_still_right()


def test_a_slow_import_costs_time_but_no_rewards(monkeypatch, no_idle_workers):
    # An import that takes longer than an answer may.
    slow = "import time; time.sleep(2.5)\n" + train.SYMPY_PROGRAM.replace(f"({train.SYMPY_SECONDS},", "(2,")
    monkeypatch.setattr(train, "SYMPY_PROGRAM", slow)
    assert_sympy_still_right()


def test_a_missing_math_verify_is_an_error_not_a_zero(monkeypatch, no_idle_workers):
    monkeypatch.setattr(train, "SYMPY_PROGRAM", train.SYMPY_PROGRAM.replace("from math_verify", "from math_verify_"))
    with pytest.raises(RuntimeError, match="math-verify"):
        reward("1+x", gold="x+1")


@pytest.fixture
def no_idle_workers(monkeypatch):
    monkeypatch.setattr(train, "IDLE_WORKERS", type(train.IDLE_WORKERS)())


def test_many_threads_at_once():
    """Each gets the verdicts of its own answers, and one with an endless answer holds up no other."""
    verdicts, seconds = {}, {}

    def score(thread: int) -> None:
        start = time.monotonic()
        answers = [f"{n}+x" for n in range(20)]
        verdicts[thread] = [reward(answer, gold=f"x+{thread}")[0] for answer in answers]
        seconds[thread] = time.monotonic() - start

    assert_sympy_still_right()
    stalled = threading.Thread(target=reward, args=[ENDLESS[0]], kwargs={"gold": "5"})
    threads = [threading.Thread(target=score, args=[n]) for n in range(4)]
    for thread in [stalled, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    still_stalled = stalled.is_alive()
    stalled.join()
    assert verdicts == {thread: [float(n == thread) for n in range(20)] for thread in range(4)}
    assert still_stalled or max(seconds.values()) > 3  # a slow machine proves nothing


# --- in TRL's rollout process -----------------------------------------------------------------------------------------


def rollout_process(connection) -> None:
    """Score each `(gold, answers)` that arrives, in the code, the kind of process and the kind of thread TRL uses."""
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop

    PartialState()
    loop = types.SimpleNamespace(
        reward_funcs=[functools.partial(train.boxed_answer_reward, eos_token_id=EOS)],
        reward_func_names=["boxed_answer_reward"],
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )

    def score(gold: str, answers: list[str]) -> None:
        size = len(answers)
        group = RolloutGroup(
            prompts=[[{"role": "user", "content": "How much is it?"}]] * size,
            reward_kwargs={"ground_truth": [gold] * size, "data_source": ["MATH"] * size},
            completions=[[{"role": "assistant", "content": rf"\boxed{{{answer}}}"}] for answer in answers],
            completions_ids=[[1, 2, EOS]] * size,
            completions_sequences=[[TrainingSequence([0, 1, 2, EOS], [0, 1, 1, 1], [0.0] * 4, "r")]] * size,
            tool_call_counts=[0] * size,
            tool_failure_counts=[0] * size,
            model_version=0,
            group_id=0,
            env_rewards=[None] * size,
            rollout_rewards=[None] * size,
        )
        samples = asyncio.run(_AsyncRolloutLoop._score_group(loop, group))
        connection.send([sample.metrics["rewards/boxed_answer_reward"] for sample in samples])

    for gold, answers in iter(connection.recv, None):
        threading.Thread(target=score, args=[gold, answers]).start()


def test_in_trl_rollout_process_and_nothing_outlives_it():
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=rollout_process, args=[theirs], daemon=True)
    process.start()
    try:
        connection.send((r"\frac{\sqrt{3}}{2}", [r"\sqrt{3}/2", r"\frac{\sqrt 3}2", r"\sqrt{2}/2", "7"]))
        assert connection.poll(60), "no rewards"
        assert connection.recv() == [1.0, 1.0, 0.0, 0.0]

        # Two groups at once, so that there are two workers; then one is idle and the other busy when TRL is killed.
        for gold in ("x+1", "x+2"):
            connection.send((gold, [f"{n}+x" for n in range(40)]))
        assert connection.poll(20) and sum(connection.recv()) == 1.0
        assert connection.poll(20) and sum(connection.recv()) == 1.0
        connection.send(("x", [ENDLESS[0]]))
        time.sleep(1)
        workers = children(process.pid)
        assert len(workers) == 2
    finally:
        process.kill()
    deadline = time.monotonic() + train.SYMPY_SECONDS + 1
    while any(map(running, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
