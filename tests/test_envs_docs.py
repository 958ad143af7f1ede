"""The environment that docs/environments.md shows works as it stands there."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.sandbox.memory import MemorySandbox

PAGE = Path(__file__).parents[1] / "docs" / "environments.md"


def example(number: int) -> dict[str, Any]:
    module: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number], module)
    return module


def test_the_example_of_a_cap() -> None:
    last_lines = example(1)["last_lines"]
    for text in ("a" * 50, "€\ud800" * 20):
        for limit in range(1, 10):
            assert len(last_lines(text, limit, "python").encode()) <= limit


async def test_the_example() -> None:
    module = example(0)
    train = {task.id for task in islice(module["tasks"]("train", 0), 500)}
    heldout = list(module["tasks"]("heldout", 0))
    assert not train & {task.id for task in heldout}
    environment, sandbox = module["make"](heldout[0], 0), MemorySandbox()
    low, high = 0, 99
    for _ in range(7):
        guess = (low + high) // 2
        outcome = await environment.step(environment.parse(str(guess)), sandbox)
        if outcome.done:
            break
        low, high = (guess + 1, high) if outcome.messages[0].text == "higher" else (low, guess - 1)
    assert await environment.rewards(sandbox) == {"outcome": 1.0}
    assert not environment.parse("eight")[0].legal
