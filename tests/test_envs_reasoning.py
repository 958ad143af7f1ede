"""The environment `reasoning`: reasoning-gym's own tasks and scorers, programs run in a real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import islice

import pytest
from hpcrl_envs import reasoning

from hpcrl.config import SandboxPool
from hpcrl.rollout.environments import load_family
from hpcrl.sandbox.backend import find_backend
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.sandbox.pool import Lease, Pool
from hpcrl.types import ConfigError, Task

pytest.importorskip("reasoning_gym")
CHAIN = Task(
    environment="reasoning",
    kind="chain_sum",
    payload={
        "kind": "chain_sum",
        "question": "State the final answer to the following arithmetic problem: 57 + 87 - 70 =",
        "answer": "74",
        "metadata": {"expression": "57 + 87 - 70"},
    },
)
WORD = Task(
    environment="reasoning",
    kind="spell_backward",
    payload={
        "kind": "spell_backward",
        "question": "Spell this word backward (example: sun -> nus): sigma",
        "answer": "amgis",
        "metadata": {"word": "sigma", "word_len": 5},
    },
)


@pytest.fixture(scope="module")
def family() -> reasoning.Reasoning:
    loaded = load_family("reasoning")
    assert isinstance(loaded, reasoning.Reasoning)
    return loaded


@pytest.fixture
async def lease() -> AsyncIterator[Lease]:
    pool = Pool(SandboxPool(sessions=1, warm=0), find_backend())
    yield await pool.acquire("t", 1)
    await pool.close()


async def act(environment, sandbox, text: str):  # type: ignore[no-untyped-def]
    return await environment.step(environment.parse(text), sandbox)


async def test_a_good_trajectory(family: reasoning.Reasoning, lease: Lease) -> None:
    environment = family.make(CHAIN, 0)
    opening = await environment.reset(lease)
    assert [message.role for message in opening] == ["user", "assistant", "user", "assistant", "user"]
    assert opening[1].text == "```python\nprint(24 + 51 - 13)\n```"
    assert opening[-1].text == CHAIN.payload["question"]
    outcome = await act(environment, lease, "```python\nprint(57 + 87 - 70)\n```\nOutput: 99\nAnswer: 99")
    assert [(message.role, message.text) for message in outcome.messages] == [("user", "Output: 74")]
    assert outcome.results[0].status == "ok"
    outcome = await act(environment, lease, "Answer: 74")
    assert (outcome.done, await environment.rewards(MemorySandbox())) == (True, {"outcome": 1.0})


@pytest.mark.parametrize(
    ("task", "answer", "reward"),
    [(CHAIN, "73", 0.0), (CHAIN, "seventy-four", 0.0), (WORD, "amgis", 1.0), (WORD, "amgi", 0.0), (WORD, "", 0.0)],
)
async def test_scores(family: reasoning.Reasoning, task: Task, answer: str, reward: float) -> None:
    environment = family.make(task, 0)
    assert await environment.rewards(MemorySandbox()) == {"outcome": 0.0}
    await act(environment, MemorySandbox(), f"Answer: {answer}")
    assert await environment.rewards(MemorySandbox()) == {"outcome": reward}
    moved = family.make(task, 0)
    moved.restore(environment.state())
    assert await moved.rewards(MemorySandbox()) == {"outcome": reward}


async def test_partial_credit_is_no_success(family: reasoning.Reasoning) -> None:
    assert 0 < family._scorers["spell_backward"]("amgsi", WORD.payload) < 1  # what the threshold is for


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        ("print(1/0)", "ZeroDivisionError: division by zero", "error"),
        ("print(", "SyntaxError: '(' was never closed", "error"),
        ("pass", "", "ok"),
        ("print('é' * 500)", "é" * 150, "ok"),  # 300 bytes, not characters, and never half a character
    ],
)
async def test_output(family: reasoning.Reasoning, lease: Lease, code: str, text: str, status: str) -> None:
    environment = family.make(CHAIN, 0)
    outcome = await act(environment, lease, f"```python\n{code}\n```")
    assert outcome.messages[0].text == f"Output: {text}"
    assert outcome.results[0].status == status
    if "500" in code:
        assert outcome.results[0].unseen_bytes == 1001 - 300


async def test_what_is_no_call_is_told(family: reasoning.Reasoning) -> None:
    environment = family.make(CHAIN, 0)
    (call,) = environment.parse("```python\nprint(1")
    assert not call.legal
    outcome = await environment.step([call], MemorySandbox())
    assert outcome.messages[0].text == "Output: neither a python block nor an answer"
    assert not outcome.done


def test_splits(family: reasoning.Reasoning) -> None:
    heldout = list(islice(family.tasks("heldout", 0), 600))
    train = list(islice(family.tasks("train", 0), 1500))
    assert [task.id for task in train] == [task.id for task in islice(family.tasks("train", 0), 1500)]
    assert not {task.payload["question"] for task in heldout} & {task.payload["question"] for task in train}
    assert len({task.id for task in heldout}) == 600
    assert {task.kind for task in train} == set(reasoning.DEFAULT_KINDS)
    assert train[0].id != next(family.tasks("train", 1)).id
    bits = [task for task in family.tasks("heldout", 0) if task.kind == "count_bits"]
    assert 30 < len(bits) < 100  # of 255 questions: the stream ends, and doesn't hang


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": ["x"]}, r"options\.kind: unknown; 'reasoning' takes: kinds"),
        ({"kinds": ["chainsum"]}, "unknown kind 'chainsum'; known: chain_sum"),
        ({"kinds": {"chain_sum": {"terms": 3}}}, r"options\.kinds\.chain_sum: .*terms"),
        ({"kinds": []}, "at least one kind"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_family("reasoning", options)


def test_no_expert(family: reasoning.Reasoning) -> None:
    with pytest.raises(ConfigError, match="'reasoning' has no expert"):
        family.expert(CHAIN, "", 0)
