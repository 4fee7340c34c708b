"""Nothing is lost and no two policies are mixed: a short storm on real vLLM, TRL and FSDP2, about
five minutes alone.

The harms and their order come from a fixed seed; every harm that bench/chaos.py knows comes once.
"""

import itertools
import os
import threading

import pytest
import requests
from chaos import FINISH_S, HARMS, LocalRun, Watch, checks, plan, replica_here, storm

STEPS, SEED, EVERY = 40, 647, 5  # optimizer steps; of the harms; seconds between two, on average
TOKEN = {"Authorization": "Bearer hf_local"}  # launch.sh --local's
QUESTIONS = [f"{a}+{9 - a}=? Answer in \\boxed{{}}." for a in range(6)]
TOLERANCE = 1e-3  # of a log probability: float32, in batches of different sizes


def test_a_seed_is_a_plan():
    first, again, other = (list(itertools.islice(plan(seed, 5), 12)) for seed in (3, 3, 4))
    assert first == again != other
    assert {harm for _, harm, _ in first[:5]} == {harm for _, harm, _ in first[5:10]} == set(HARMS)
    assert all(1.5 <= gap <= 8.5 and 0 <= amount < 1 for gap, _, amount in first)


def greedy(url: str, policy: str) -> list[list[tuple[str, float]]]:
    """What a server answers to QUESTIONS under a policy: tokens and their log probabilities.
    requests' exceptions."""
    found = []
    for question in QUESTIONS:
        order = {
            "model": policy,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
        }
        order |= {"temperature": 0, "logprobs": True}
        reply = requests.post(f"{url}/v1/chat/completions", json=order, headers=TOKEN, timeout=30)
        reply.raise_for_status()
        found.append(
            [
                (each["token"], each["logprob"])
                for each in reply.json()["choices"][0]["logprobs"]["content"]
            ]
        )
    return found


def distance(one, other) -> float:
    """The largest difference of log probabilities; infinite if the tokens differ."""
    if [[token for token, _ in answer] for answer in one] != [
        [token for token, _ in answer] for answer in other
    ]:
        return float("inf")
    return max(
        abs(a[1] - b[1]) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


class Interview:
    """A thread that asks each replica under each policy it holds, once the trainer has been killed
    and has resumed."""

    def __init__(self, run: LocalRun):
        self.run, self.said = run, {}  # {(Job, policy): what it answered}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.ask_on, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(60)

    def ask_on(self):
        while not self.over.wait(1):
            if "[train] resuming from" not in self.run.log():
                continue
            for job in self.run.jobs("replica", "RUNNING"):
                try:
                    self.ask(job["id"], job["status"]["exposeUrls"][0])
                except requests.RequestException:
                    continue  # starting, frozen or killed; or the policy was retired while we asked

    def ask(self, job: str, url: str):
        reply = requests.get(f"{url}/v1/models", headers=TOKEN, timeout=30)
        reply.raise_for_status()
        for policy in (
            model["id"] for model in reply.json()["data"] if model["id"].startswith("trl-policy-v")
        ):
            if (job, policy) not in self.said:
                self.said[job, policy] = greedy(url, policy)


@pytest.fixture(scope="module")
def survivor():
    """(the run, its watch, its interview, how often each harm was done)"""
    with (
        LocalRun(
            f"test-chaos-{os.getpid()}",
            STEPS,
            lag=1,
            ATTEMPTS="20",
            SAVE_STEPS="8",
            EVAL_DATASET="",
        ) as run,
        Watch(run) as watch,
        Interview(run) as interview,
    ):
        assert run.reaches(run.last_step, "the first step", FINISH_S), run.launch_log.read_text()[
            -3000:
        ]
        done = storm(run, itertools.islice(plan(SEED, EVERY), len(HARMS)))
        assert run.ends_within(FINISH_S), run.launch_log.read_text()[-3000:]
    return run, watch, interview, done


def test_each_harm_was_done_and_survived(survivor):
    run, watch, _, done = survivor
    assert done == dict.fromkeys(HARMS, 1)
    assert watch.hashes and (watch.past + watch.proxy)["ejected"] > 0
    failed = [
        f"{what}: {found}" for what, holds, found in checks(run, watch, rise=0.1) if not holds
    ]
    assert not failed, f"{failed}, see {run.launch_log}"


def test_after_a_resume_every_policy_is_what_its_files_say(survivor):
    """What the replicas answered, some of which lived through the trainer's death, against a server
    that was never told anything but these files."""
    run, watch, interview, _ = survivor
    policies = sorted(
        {policy for _, policy in interview.said}, key=lambda name: int(name.rpartition("-v")[2])
    )
    assert len(policies) >= 3
    fresh = {}
    with replica_here(run.launch_log.with_suffix(".fresh")) as url:
        for policy in policies:
            order = {"lora_name": policy, "lora_path": str(watch.copies / policy)}
            assert (
                requests.post(f"{url}/v1/load_lora_adapter", json=order, timeout=60).status_code
                == 200
            )
            fresh[policy] = greedy(url, policy)
            requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": policy}, timeout=60)
    wrong = {key: distance(said, fresh[key[1]]) for key, said in interview.said.items()}
    assert max(wrong.values()) < TOLERANCE, wrong
    # Else the comparison above would prove nothing.
    assert (
        min(distance(fresh[a], fresh[b]) for a, b in itertools.pairwise(policies)) > 3 * TOLERANCE
    )
