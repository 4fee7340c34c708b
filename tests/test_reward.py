"""The boxed-answer reward: which answers count as equal, and that none can stall or outlive a run.

About a minute, most of it spent on answers that must run into the time limit.
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

EOS, END_OF_TURN = 0x10FFFF, 0x10FFFE  # no characters
CUT_OFF = ord("!")  # any token but EOS

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
    (r"\$18.90", "18.90"),
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
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\mathrm{Evelyn}"),
    (r"\text{(C)}", "C"),
    ("C", "(C)"),
    ("A, C", r"\text{A}, \text{C}"),
    (r"\text{Sam and Bob}", r"\text{Sam and Bob}"),
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
    (r"x \leq 2", "x <= 2"),
    (r"x \neq 3", "x != 3"),
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

REFUSED = [  # right answers that count as wrong, as README.md says: at most one in eight
    (r"1\,000\,000", "1,000,000"),
    (r"\$18.90", r"18.9\text{ dollars}"),
    (r"12\pi\text{ cm}^3", r"12\pi \mathrm{cm}^{3}"),
    (r"10\text{ a.m.}", r"10 \text{ am}"),
    (r"\text{even}", r"\textbf{Even}"),
    (r"\text{no solution}", r"\text{No solution}"),
    ("2516_8", "2516_{8}"),
    ("6,7,8", r"6, 7 \text{ and } 8"),
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
    # what differs by less than a float can tell
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"\frac{2^{100}-1}{2^{100}}", r"\frac{1}{2^{100}}"),
    (r"\frac{2^{100}-1}{2^{100}}", "1"),
    (r"\frac{1}{20!}", r"\frac{1}{19!}"),
    (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
    (r"(1,\frac{1}{2^{99}})", r"(1,\frac{1}{2^{98}})"),
    (r"[0,\frac{1}{2^{99}}]", r"[0,\frac{1}{2^{98}}]"),
    (r"x<\frac{1}{2^{99}}", r"x<\frac{1}{2^{98}}"),
    (r"\begin{pmatrix}2^{-99}\\2\end{pmatrix}", r"\begin{pmatrix}2^{-98}\\2\end{pmatrix}"),
    ("0.0000000000000001", "0.0000000000000002"),
    (r"\sqrt{2}", "1.4142135623730951"),
    ("2x+y=3", "y=2x+3"),
]

ENDLESS = [  # answers on which sympy would run for hours, or out of memory
    r"9^{9^{9^{9}}}",
    r"\binom{10^9}{10^8}",
    r"(((x+1)^{99999}+1)^{99999}+1)^{99999}",
    "100000000!",
    "(" * 140 + "1" + ")" * 140,
]
HUGE = [
    "{" * 10**5 + "5" + "}" * 10**5,
    "{" * 10**5 + "5",
    r"\boxed{" * 10**5,
    "1" * 100_000,
    "x+" * 140 + "x",
]


class Characters:
    """A tokenizer whose ids are characters' numbers, so that a text is its own token ids."""

    @staticmethod
    def decode(ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(chr, ids))


def ids_of(text: str, *ends: int) -> list[int]:
    return [*map(ord, text), *ends]


score = functools.partial(train.boxed_answer_reward, Characters, {EOS}, {EOS, END_OF_TURN})


def reward(*answers: str, gold: str, end: int = EOS) -> list[float]:
    """Rewards of completions that end in these boxed answers, called as TRL does."""
    return score(
        completions=[[{"role": "assistant", "content": "not read"}]] * len(answers),
        prompts=[[{"role": "user", "content": "How much is it?"}]] * len(answers),
        completion_ids=[ids_of(rf"The answer is \boxed{{{answer}}}.", end) for answer in answers],
        ground_truth=[gold] * len(answers),
        data_source=["MATH"] * len(answers),
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


# --- equal or not


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert reward(answer, gold=gold) == [1.0]


def test_right_answers_that_are_refused_are_few():
    missed = [pair for pair in REFUSED if not train.answers_equal(*pair)]
    assert len(missed) <= len(EQUAL + REFUSED) / 8


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal(gold, answer):
    assert reward(answer, gold=gold) == [0.0]
    assert reward(gold, gold=answer or "0") == [0.0]


@pytest.mark.parametrize(
    "answer", sorted({answer for pair in EQUAL + UNEQUAL for answer in pair if answer.strip("\\%")})
)
def test_an_answer_equals_itself(answer):
    assert reward(answer, f" {answer} ", gold=answer) == [1.0, 1.0]


def test_the_same_text_is_not_parsed(monkeypatch):
    monkeypatch.setattr(train, "sympy_equal", lambda *pair: pytest.fail(f"parsed {pair}"))
    assert reward("5", r"5\%", "x = 5", " $5$.", gold="5") == [1.0] * 4


# --- finding the answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}, no: \boxed{4}.", "4"),
        (r"It is \boxed{5}, which is what we wanted to show, QED.", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        # an escaped brace opens nothing
        (r"\boxed{\left\{ x \mid x > 0 \right.}", r"\left\{ x \mid x > 0 \right."),
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
    assert reward("5", gold="5", end=CUT_OFF) == [0.0]
    assert reward("5", gold="5", end=END_OF_TURN) == [0.0]  # it went on and was cut off then
    assert score(completion_ids=[[]], ground_truth=["5"]) == [0.0]


def test_what_follows_the_first_end_of_a_turn_is_not_graded():
    right = ids_of(r"\boxed{5}", END_OF_TURN) + ids_of("\n", EOS)
    went_on = ids_of(r"\boxed{5}", END_OF_TURN) + ids_of("\nHuman: what is \\boxed{2}?", EOS)
    late = ids_of(r"\boxed{2}", END_OF_TURN) + ids_of(r"\boxed{5}", EOS)
    assert score(completion_ids=[right, went_on, late], ground_truth=["5"] * 3) == [1, 1, 0]


def test_any_of_the_models_eos_ids_is_an_end():
    either = functools.partial(train.boxed_answer_reward, Characters, {EOS, 106}, {EOS, 106})
    completions = [ids_of(r"\boxed{5}", EOS), ids_of(r"\boxed{5}", 106), ids_of(r"\boxed{5}", 107)]
    assert either(completion_ids=completions, ground_truth=["5"] * 3) == [1.0, 1.0, 0.0]


def test_each_completion_is_scored_against_its_own_ground_truth():
    completions = [ids_of(rf"\boxed{{{n}}}", end) for n, end in ((1, EOS), (2, CUT_OFF), (3, EOS))]
    assert score(completion_ids=completions, ground_truth=["1", "2", "4"]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError):
        score(completion_ids=completions, ground_truth=["1"])


@pytest.mark.parametrize("boxes", [0, 1])
def test_a_line_says_that_nothing_was_boxed(monkeypatch, capsys, boxes):
    monkeypatch.setattr(train, "boxes", [])
    texts = [r"\boxed{7}"] * boxes + ["The answer is 5."] * (104 - boxes)
    for group in range(0, 104, 8):
        completions = [ids_of(text, EOS) for text in texts[group : group + 8]]
        score(completion_ids=completions, ground_truth=["5"] * 8)
    said = capsys.readouterr().out
    assert said.count("\n") == (1 - boxes) and (r"\boxed{}" in said) == (not boxes)


# --- bounds


@pytest.mark.parametrize("answer", ENDLESS + HUGE, ids=lambda answer: answer[:25])
def test_no_answer_stalls_scoring(answer, monkeypatch):
    """One worker at most is lost to it, at its alarm; the work in this process is small."""
    assert_sympy_still_right()
    completion = ids_of(rf"\boxed{{{answer}}}", EOS)
    group = {"completion_ids": [completion] * 8, "ground_truth": [r"\frac{\sqrt{3}}{2}"] * 8}
    # None starts for the seven equal answers.
    monkeypatch.setattr(train, "Popen", None)
    begin = time.process_time()
    assert score(**group) == [0.0] * 8
    assert time.process_time() - begin < 2
    monkeypatch.undo()
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


def test_a_worker_killed_while_idle_is_replaced():
    assert_sympy_still_right()
    for worker in children(os.getpid()):
        os.kill(worker, signal.SIGKILL)
        while running(worker):
            time.sleep(0.01)
    assert_sympy_still_right()


def test_a_missing_math_verify_is_an_error_not_a_zero(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(train, "worker", None)
    with pytest.raises(RuntimeError, match="math-verify"):
        reward("1+x", gold="x+1")


# --- in TRL's rollout process


def rollout_process(connection) -> None:
    """Score each `(gold, answers)` that arrives, in the code, process and thread that TRL uses."""
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import (
        RolloutGroup,
        TrainingSequence,
        _AsyncRolloutLoop,
    )

    PartialState()
    loop = types.SimpleNamespace(
        reward_funcs=[score],
        reward_func_names=["boxed_answer_reward"],
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )

    def score_group(gold: str, answers: list[str]) -> None:
        size = len(answers)
        group = RolloutGroup(
            prompts=[[{"role": "user", "content": "How much is it?"}]] * size,
            reward_kwargs={"ground_truth": [gold] * size, "data_source": ["MATH"] * size},
            completions=[
                [{"role": "assistant", "content": rf"\boxed{{{answer}}}"}] for answer in answers
            ],
            completions_ids=[ids_of(rf"\boxed{{{answer}}}", EOS) for answer in answers],
            completions_sequences=[[TrainingSequence([0, 1, 2, EOS], [0, 1, 1, 1], [0.0] * 4, "r")]]
            * size,
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
        threading.Thread(target=score_group, args=[gold, answers]).start()


def test_in_trl_rollout_process_and_nothing_outlives_it():
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=rollout_process, args=[theirs], daemon=True)
    process.start()
    try:
        connection.send(
            (r"\frac{\sqrt{3}}{2}", [r"\sqrt{3}/2", r"\frac{\sqrt 3}2", r"\sqrt{2}/2", "7"])
        )
        assert connection.poll(60), "no rewards"
        assert connection.recv() == [1.0, 1.0, 0.0, 0.0]

        connection.send(("x", [ENDLESS[0]]))
        time.sleep(1)  # of SYMPY_SECONDS: the worker is busy when TRL is killed
        workers = children(process.pid)
        assert len(workers) == 1
    finally:
        process.kill()
    deadline = time.monotonic() + train.SYMPY_SECONDS + 10
    while any(map(running, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
