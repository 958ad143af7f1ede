"""The environment `find`: its texts, its splits, its expert, and perfect play through a real sandbox."""

from __future__ import annotations

from itertools import islice

import pytest
from hpcrl_envs import find

from hpcrl.config import SandboxPool
from hpcrl.rollout.environments import load_family
from hpcrl.sandbox.backend import find_backend
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.sandbox.pool import Pool
from hpcrl.types import ConfigError, Sandbox, Task


def perfect(task: Task, transcript: str, seed: int) -> str:
    name = next(path for path in task.payload["files"] if path[0] == task.payload["key"])
    turn = transcript.count("<a>") - 1
    return ["ls", f"cat {name}", f"answer {task.payload['files'][name]}"][turn]


async def play(task: Task, sandbox: Sandbox, policy, seed: int = 0, max_steps: int = 5):  # type: ignore[no-untyped-def]
    """One episode in the tiny tokenizer's text; (reward, transcript)."""
    environment = find.make(task, seed)
    (opening,) = await environment.reset(sandbox)
    text = f"<bos><u>{opening.text}<e><a>"
    for _ in range(max_steps):
        act = policy(task, text, seed)
        outcome = await environment.step(environment.parse(act), sandbox)
        text += f"{act}<e>" + "".join(f"<t>{message.text}<e>" for message in outcome.messages)
        assert all(message.role == "tool" for message in outcome.messages)
        if outcome.done:
            break
        text += "<a>"
    return (await environment.rewards(sandbox))["outcome"], text


def test_the_module_is_a_family() -> None:
    family = load_family("find")
    assert (family.name, family.needs_sandbox) == ("find", True)


def test_unknown_environment_and_option_name_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"'fnd'; did you mean 'find'\?.*reasoning"):
        load_family("fnd")
    with pytest.raises(ConfigError, match="takes no options, found: files"):
        load_family("find", {"files": 5})


def test_splits_are_repeatable_and_share_no_task() -> None:
    train = [task.id for task in islice(find.tasks("train", 0), 3000)]
    heldout = [task.id for task in islice(find.tasks("heldout", 0), 3000)]
    assert train == [task.id for task in islice(find.tasks("train", 0), 3000)]
    assert train[:10] != [task.id for task in islice(find.tasks("train", 1), 10)]
    other = {task.id for task in islice(find.tasks("heldout", 1), 3000)}
    assert not set(train) & (set(heldout) | other)
    assert len(set(heldout)) == 3000


async def test_observations_are_these_texts() -> None:
    task = Task(environment="find", payload={"key": "N", "files": {"Y6": "901", "N5": "233", "V1": "000", "D7": "017"}})
    acts = iter(["ls", "cat", "cat N6", "cat N5", "answer 233"])
    reward, text = await play(task, MemorySandbox(), lambda *_: next(acts))
    assert text == (
        "<bos><u>find N<e><a>ls<e><t>D7 N5 V1 Y6<e><a>cat<e><t>bad call<e><a>cat N6<e><t>no file<e>"
        "<a>cat N5<e><t>233<e><a>answer 233<e>"
    )
    assert reward == 1.0


@pytest.mark.parametrize(
    "acts",
    [
        ["answer 233"],  # a guess, however right
        ["cat N5", "answer 233"],  # one good call only
        ["cat N6", "xx", "answer 233"],  # calls, but not good ones
        ["ls", "cat D7", "answer 017"],
        ["ls", "cat N5", "ls", "ls", "ls"],  # never answers
        ["", " ", "ls ls", "cat ../N5", "cat /etc/passwd"],
    ],
)
async def test_no_reward(acts: list[str]) -> None:
    task = Task(environment="find", payload={"key": "N", "files": {"Y6": "901", "N5": "233", "V1": "000", "D7": "017"}})
    turns = iter(acts)
    reward, _ = await play(task, MemorySandbox(), lambda *_: next(turns))
    assert reward == 0.0


async def test_state_survives_a_move() -> None:
    task = next(find.tasks("train", 0))
    sandbox = MemorySandbox()
    first = find.make(task, 0)
    await first.reset(sandbox)
    path = next(name for name in task.payload["files"] if name[0] == task.payload["key"])
    for act in ("ls", f"cat {path}"):
        await first.step(first.parse(act), sandbox)
    second = find.make(task, 0)
    second.restore(first.state())
    await second.step(second.parse(f"answer {task.payload['files'][path]}"), sandbox)
    assert await second.rewards(sandbox) == {"outcome": 1.0}


async def test_expert_is_deterministic_and_imperfect() -> None:
    results = []
    for task in islice(find.tasks("train", 0), 1500):
        reward, text = await play(task, MemorySandbox(), find.expert)
        results.append((reward, text))
        assert all(len(act.split("<e>")[0]) <= 13 for act in text.split("<a>")[1:])
    rate = sum(reward for reward, _ in results) / len(results)
    assert 0.35 < rate < 0.50
    again = [await play(task, MemorySandbox(), find.expert) for task in islice(find.tasks("train", 0), 50)]
    assert again == results[:50]
    other = [await play(task, MemorySandbox(), find.expert, seed=1) for task in islice(find.tasks("train", 0), 50)]
    assert other != results[:50]


async def test_perfect_play_in_a_real_sandbox() -> None:
    pool = Pool(SandboxPool(sessions=1, warm=1), find_backend())
    try:
        for number, task in enumerate(islice(find.tasks("heldout", 0), 20)):
            lease = await pool.acquire(f"{task.id}.{number}", 1)
            reward, text = await play(task, lease, perfect)
            assert reward == 1.0, text
            await pool.release(lease.trajectory)
        assert pool.stats().started == 1
    finally:
        await pool.close()
