"""The environment `find`: one of four files holds the answer; find out which, read it, say it.

    user: find N      act: ls         tool: D7 N5 V1 Y6
                      act: cat N5     tool: 233
                      act: answer 233

Files are named by a letter and a random digit, so that the name must be looked up; each holds three random digits. A
call that isn't one gets `bad call`, a file that isn't there `no file`. Small enough for a model of 100k parameters
to learn in minutes on a CPU, and yet every success needs two real commands in the sandbox. `expert` is deliberately
imperfect: what is cloned from it leaves room for reinforcement learning.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from hpcrl.types import Cause, Environment, Fault, Message, Sandbox, StepOutcome, Task, ToolCall, ToolResult, ToolSpec

name = "find"
needs_sandbox = True

NUM_FILES = 4
NUM_HELDOUT = 10_000
GOOD_CALLS = 2  # that a right answer must rest on
COMMAND_TIMEOUT_S = 10.0

# How often the expert errs: per turn, per early turn, and at the choice that the name says.
MALFORMED, EARLY, SKIP_LS, WRONG_FILE, GIVE_UP = 0.08, 0.1, 0.15, 0.35, 0.1

_ACT = re.compile(r"(ls)|(cat) ([A-Za-z0-9]+)|(answer) (\S+)")
_LISTING = re.compile(r"[A-Z][0-9]( [A-Z][0-9])+")
_TOOLS = (
    ToolSpec(name="ls", description="names of all files"),
    ToolSpec(name="cat", description="cat NAME: the content of a file"),
    ToolSpec(name="answer", description="answer DIGITS: ends the task"),
)


def tasks(split: Literal["train", "heldout"], seed: int) -> Iterator[Task]:
    """A quarter of all tasks, told by their content's hash, is held out."""
    rng = random.Random(f"find/{split}/{seed}")
    seen: set[str] = set()
    while split == "train" or len(seen) < NUM_HELDOUT:
        task = _draw(rng)
        if (int(task.id[-12:], 16) % 4 == 0) != (split == "heldout"):
            continue
        if split == "heldout":
            if task.id in seen:
                continue
            seen.add(task.id)
        yield task


def _draw(rng: random.Random) -> Task:
    keys = rng.sample(string.ascii_uppercase, NUM_FILES)
    files = {f"{key}{rng.randrange(10)}": f"{rng.randrange(1000):03d}" for key in keys}
    return Task(environment=name, payload={"key": rng.choice(keys), "files": dict(sorted(files.items()))})


def make(task: Task, seed: int) -> Environment:
    return Find(task, seed)


class Find:
    def __init__(self, task: Task, seed: int) -> None:
        self._key: str = task.payload["key"]
        self._files: Mapping[str, str] = task.payload["files"]
        self._good_calls = 0
        self._answer = ""

    def tools(self) -> tuple[ToolSpec, ...]:
        return _TOOLS

    async def reset(self, sandbox: Sandbox) -> tuple[Message, ...]:
        await sandbox.write({path: f"{content}\n".encode() for path, content in self._files.items()})
        return (Message.of("user", f"find {self._key}"),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        match = _ACT.fullmatch(text.strip())
        if match is None:
            return (ToolCall(name="", arguments={"text": text}, legal=False),)
        words = [word for word in match.groups() if word]
        return (ToolCall(name=words[0], arguments={"text": words[1]} if len(words) > 1 else {}),)

    async def step(self, calls: Sequence[ToolCall], sandbox: Sandbox) -> StepOutcome:
        call = calls[0] if calls else ToolCall(name="", arguments={}, legal=False)
        if not call.legal:
            return _say(ToolResult(name=call.name, status="refused", text="bad call"))
        if call.name == "answer":
            self._answer = str(call.arguments["text"])
            return StepOutcome(results=(ToolResult(name="answer", status="ok", text=""),), messages=(), done=True)
        command = ["ls"] if call.name == "ls" else ["cat", "--", str(call.arguments["text"])]
        result = await sandbox.run(command, timeout_s=COMMAND_TIMEOUT_S)
        if result.code is None:
            fault = Fault(cause=Cause.TOOL, where="sandbox", message=f"{call.name} was ended: {result.killed}")
            return _say(ToolResult(name=call.name, status="timeout", text="no answer"), fault)
        if result.code != 0:
            return _say(ToolResult(name=call.name, status="error", text="no file", duration_s=result.duration_s))
        self._good_calls += 1
        text = " ".join(result.stdout.decode(errors="replace").split())
        return _say(ToolResult(name=call.name, status="ok", text=text, duration_s=result.duration_s))

    async def rewards(self, sandbox: Sandbox) -> Mapping[str, float]:
        right = next(content for path, content in self._files.items() if path[0] == self._key)
        return {"outcome": float(self._answer == right and self._good_calls >= GOOD_CALLS)}

    def state(self) -> bytes:
        return json.dumps({"good_calls": self._good_calls, "answer": self._answer}).encode()

    def restore(self, state: bytes) -> None:
        saved: dict[str, Any] = json.loads(state)
        self._good_calls, self._answer = saved["good_calls"], saved["answer"]


def _say(result: ToolResult, fault: Fault | None = None) -> StepOutcome:
    return StepOutcome(results=(result,), messages=(Message.of("tool", result.text),), done=False, fault=fault)


def expert(task: Task, transcript: str, seed: int) -> str:
    """The next act, given the context as the tiny tokenizer writes it: `<u>find N<e><a>ls<e><t>D7 N5 …<e><a>`."""
    rng = random.Random(f"{task.id}/{seed}/{transcript}")
    key = task.payload["key"]
    num_acts = len(re.findall(r"<a>[^<]*<e>", transcript))
    seen = re.findall(r"<t>([^<]*)<e>", transcript)
    listing: list[str] = next((text.split() for text in seen if _LISTING.fullmatch(text)), [])
    content = next((text for text in reversed(seen) if re.fullmatch(r"[0-9]{3}", text)), "")
    guess = f"answer {rng.randrange(1000):03d}"
    if rng.random() < MALFORMED:
        return rng.choice(["l", "lss", "cat", "cta", f"find {key}", f"cat{key}", "answer"])
    if num_acts < 2 and rng.random() < EARLY:
        return guess
    if content:
        return guess if rng.random() < GIVE_UP else f"answer {content}"
    if not listing:
        return f"cat {key}{rng.randrange(10)}" if rng.random() < SKIP_LS else "ls"
    wrong = rng.random() < WRONG_FILE
    return f"cat {rng.choice([path for path in listing if (path[0] != key) == wrong])}"
