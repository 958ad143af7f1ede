"""The environment `reasoning`: tasks and scorers of the library reasoning-gym, answered with the help of Python.

    per worked example: user: question, assistant: ```python …```, user: Output: …, assistant: Answer: …
    user: question     act: ```python                      user: Output: 214
                            print(57 + 87 + 70)
                            ```
                       act: Answer: 214

Each kind shows worked examples of its own: without them a model of 135M parameters never succeeds, with them it calls
validly 60 to 100% of the time. Fenced code is far easier for it than JSON. Success is the library's full score: its
scorers give partial credit for wrong answers, which would be a reward for them.

Options: `kinds`, a list of names or a table of name -> parameters of that reasoning-gym dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from hpcrl.types import (
    ConfigError,
    Environment,
    Message,
    Sandbox,
    StepOutcome,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

CODE_TIMEOUT_S = 10.0
OUTPUT_BYTES = 300  # of a program's output that the model sees
SUCCESS = 0.99  # score from which an answer counts as right
HELDOUT_PER_KIND = 2000
_MISSES = 2000  # draws without a new task after which a kind's held-out tasks are taken to be used up

# kind: (parameters, worked examples as (question, program, output)); the settings are ones where success is mixed.
_KINDS: dict[str, tuple[dict[str, int], tuple[tuple[str, str, str], ...]]] = {
    "chain_sum": (
        {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2},
        (
            (
                "State the final answer to the following arithmetic problem: 24 + 51 - 13 =",
                "print(24 + 51 - 13)",
                "62",
            ),
        ),
    ),
    "count_bits": (
        {"min_n": 1, "max_n": 255},
        (
            (
                "How many 1 bits are there in the binary representation of the number 90?",
                'print(bin(90).count("1"))',
                "4",
            ),
        ),
    ),
    "spell_backward": (
        {"min_word_len": 5, "max_word_len": 6},
        (
            ("Spell this word backward (example: sun -> nus): tiger", 'print("tiger"[::-1])', "regit"),
            ("Spell this word backward (example: sun -> nus): planet", 'print("planet"[::-1])', "tenalp"),
        ),
    ),
    "products": (
        {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        (
            (
                "Solve the following multiplication: 38 * 27. Give only the result as your final answer.",
                "print(38 * 27)",
                "1026",
            ),
        ),
    ),
}
Scorer = Callable[[str, Mapping[str, Any]], float]  # the library's: (answer, item) -> 0 … 1
DEFAULT_KINDS = ("chain_sum", "count_bits", "spell_backward")

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_ANSWER = re.compile(r"Answer:[ \t]*(.*)")
_TOOLS = (
    ToolSpec(name="python", description="a fenced python block: runs it and returns what it prints"),
    ToolSpec(name="answer", description="Answer: X: ends the task"),
)


def configure(options: Mapping[str, Any]) -> Reasoning:
    """Raises ConfigError for an unknown option, kind or parameter, and where reasoning-gym isn't installed."""
    unknown = [key for key in options if key != "kinds"]
    if unknown:
        raise ConfigError(f"environment.options.{unknown[0]}: unknown; 'reasoning' takes: kinds")
    chosen = options.get("kinds", DEFAULT_KINDS)
    table = dict(chosen) if isinstance(chosen, Mapping) else {kind: {} for kind in chosen}
    for kind in table:
        if kind not in _KINDS:
            raise ConfigError(f"environment.options.kinds: unknown kind {kind!r}; known: {', '.join(_KINDS)}")
    if not table:
        raise ConfigError("environment.options.kinds: at least one kind is needed")
    return Reasoning({kind: {**_KINDS[kind][0], **parameters} for kind, parameters in table.items()})


class Reasoning:
    """The family, with its kinds of task."""

    name = "reasoning"
    needs_sandbox = True

    def __init__(self, kinds: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            import reasoning_gym  # takes seconds, so here, and only when a run asks for it
        except ImportError as error:
            raise ConfigError(
                f"environment 'reasoning' needs reasoning-gym ({error}): pip install 'hpcrl[smollm2]'"
            ) from error
        self._gym = reasoning_gym
        self._kinds = kinds
        self._scorers: dict[str, Scorer] = {kind: self._dataset(kind, 0).score_answer for kind in kinds}

    def tasks(self, split: Literal["train", "heldout"], seed: int) -> Iterator[Task]:
        """The kinds in turn. Per kind a quarter of all questions, told by their hash, is held out."""
        streams = [self._stream(kind, split, seed) for kind in self._kinds]
        for row in itertools.zip_longest(*streams):
            yield from (task for task in row if task is not None)

    def _stream(self, kind: str, split: str, seed: int) -> Iterator[Task]:
        shown = {question for question, _, _ in _KINDS[kind][1]}
        # The library's item i of seed s is item i+1 of seed s-1, so a seed of ours starts far from every other.
        start = int.from_bytes(hashlib.sha256(f"{kind}/{split}/{seed}".encode()).digest()[:4], "big")
        dataset, seen, misses = self._dataset(kind, start), set[str](), 0
        for index in itertools.count():
            item = dataset[index]
            question = item["question"]
            heldout = hashlib.sha256(f"{kind}/{question}".encode()).digest()[0] < 64
            if heldout != (split == "heldout") or question in shown:
                continue
            if heldout:
                misses = misses + 1 if question in seen else 0
                if len(seen) == HELDOUT_PER_KIND or misses > _MISSES:
                    return
                if question in seen:
                    continue
                seen.add(question)
            metadata = {key: item["metadata"][key] for key in item["metadata"] if key not in _NOT_CONTENT}
            payload = {"question": question, "answer": item["answer"], "metadata": metadata}
            yield Task(environment=self.name, payload={"kind": kind, **payload}, kind=kind)

    def make(self, task: Task, seed: int) -> Environment:
        return Problem(task, self._scorers[task.kind])

    def expert(self, task: Task, transcript: str, seed: int) -> str:
        raise ConfigError("environment 'reasoning' has no expert: a phase with objective 'sft' can't use it")

    def _dataset(self, kind: str, seed: int) -> Any:
        try:
            return self._gym.create_dataset(kind, seed=seed, size=1 << 30, **self._kinds[kind])
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"environment.options.kinds.{kind}: {error}") from error


_NOT_CONTENT = ("source_index", "difficulty")  # of an item's metadata: where it came from, not what it is


class Problem:
    """One trajectory at one question."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self._task = task
        self._scorer = scorer
        self._answer: str | None = None

    def tools(self) -> tuple[ToolSpec, ...]:
        return _TOOLS

    async def reset(self, sandbox: Sandbox) -> tuple[Message, ...]:
        # No system message: SmolLM2 does better with its template's own (0.43 against 0.0 on chain_sum, few samples).
        messages = []
        for question, program, output in _KINDS[self._task.kind][1]:
            messages.append(Message.of("user", question))
            messages.append(Message.of("assistant", f"```python\n{program}\n```"))
            messages.append(Message.of("user", f"Output: {output}"))
            messages.append(Message.of("assistant", f"Answer: {output}"))
        return (*messages, Message.of("user", self._task.payload["question"]))

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The first code block; else the answer. What follows the block is the model's guess of its output."""
        block = _BLOCK.search(text)
        if block is not None:
            return (ToolCall(name="python", arguments={"code": block[1]}),)
        answer = _ANSWER.search(text)
        if answer is not None:
            return (ToolCall(name="answer", arguments={"text": answer[1].strip()}),)
        return (ToolCall(name="", arguments={"text": text}, legal=False),)

    async def step(self, calls: Sequence[ToolCall], sandbox: Sandbox) -> StepOutcome:
        call = calls[0] if calls else ToolCall(name="", arguments={}, legal=False)
        if not call.legal:
            return _say(ToolResult(name=call.name, status="refused", text="neither a python block nor an answer"))
        if call.name == "answer":
            self._answer = str(call.arguments["text"])
            return StepOutcome(results=(ToolResult(name="answer", status="ok", text=""),), messages=(), done=True)
        # By stdin: writing a file could be made to fail by what an earlier program did (a full disk, a folder there).
        code = str(call.arguments["code"]).encode(errors="replace")
        result = await sandbox.run(["python3", "-"], stdin=code, timeout_s=CODE_TIMEOUT_S, cap_bytes=1 << 16)
        if result.code is None:
            # The program is the policy's own: what it used up is its failure, not the tool's.
            text = f"killed ({result.killed})"
            return _say(ToolResult(name="python", status="timeout", text=text, duration_s=result.duration_s))
        failed = result.code != 0
        shown = (result.stderr.strip().splitlines() or [b""])[-1] if failed else result.stdout.strip()
        cut = shown[:OUTPUT_BYTES]
        true_bytes = result.stderr_bytes + result.stdout_bytes if failed else result.stdout_bytes
        return _say(
            ToolResult(
                name="python",
                status="error" if failed else "ok",
                text=cut.decode(errors="ignore"),
                duration_s=result.duration_s,
                unseen_bytes=true_bytes - len(cut),
                cut_reason="cap" if len(cut) < len(shown) else "last line only" if failed else "",
                unseen_hash=hashlib.sha256(shown[OUTPUT_BYTES:]).hexdigest() if len(cut) < len(shown) else "",
            )
        )

    async def rewards(self, sandbox: Sandbox) -> Mapping[str, float]:
        score = 0.0 if self._answer is None else self._scorer(self._answer, self._task.payload)
        return {"outcome": float(score >= SUCCESS)}

    def state(self) -> bytes:
        return json.dumps({"answer": self._answer}).encode()

    def restore(self, state: bytes) -> None:
        self._answer = json.loads(state)["answer"]


def _say(result: ToolResult) -> StepOutcome:
    return StepOutcome(results=(result,), messages=(Message.of("user", f"Output: {result.text}"),), done=False)
