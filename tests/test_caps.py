"""Caps, media and replaced contexts: what the model sees is whole in the store, what it doesn't see is named there."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop_parts import loop, node_log, stored, ticket

from hpcrl import config
from hpcrl.layout import RunPaths
from hpcrl.rollout.caps import Cap, encoded, head_tail, load_cap
from hpcrl.rollout.loop import history_of
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient
from hpcrl.store.records import Kind
from hpcrl.store.segment import CLOSED, OPEN, read_segment, segments
from hpcrl.store.verify import missing, verify
from hpcrl.types import (
    Cause,
    ConfigError,
    Ended,
    Fault,
    Message,
    Part,
    Sampling,
    State,
    StepOutcome,
    ToolCall,
    ToolResult,
    ToolSpec,
)

# Any code point, lone surrogates and pairs of them as well.
ANY = st.lists(st.characters(exclude_categories=()) | st.sampled_from(["a", "€", "😀", "\ud83d\ude00"])).map("".join)


# ---- the cut


@given(ANY, st.integers(1, 200))
@settings(max_examples=500, deadline=None)
def test_head_and_tail_fit_split_nothing_and_say_what_is_missing(text: str, limit: int) -> None:
    text *= 1 + limit // max(1, len(text))  # longer than the limit, in whatever way
    whole = encoded(text)
    if len(whole) <= limit:
        return
    shown, unseen = head_tail(whole, limit)
    assert len(encoded(shown)) <= limit
    marker = re.search(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", shown)
    head, tail = (shown[: marker.start()], shown[marker.end() :]) if marker else (shown, "")
    assert marker is None or int(marker[1]) == unseen
    assert marker is not None or limit < 50
    assert text.startswith(head) and text.endswith(tail)
    middle = text[len(head) : len(text) - len(tail)]
    assert len(encoded(middle)) == unseen > 0
    for before, after in ((head, middle), (middle, tail)):
        assert not ("\ud800" <= before[-1:] < "\udc00" and "\udc00" <= after[:1] < "\ue000"), "a pair is split"
    if marker:  # no more is left out than a code point at either side and the digits need
        assert len(encoded(shown)) > limit - 3 * 6


# ---- the config


def tools(**keys: Any) -> config.Tools:
    return config.Tools(**keys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('cap = "tail"', "tools.cap: must be 'head_tail' or 'package.module:function', found 'tail'"),
        ('cap = "a.b:"', "tools.cap: must be"),
        ("keep_unseen = true", "tools: cap and keep_unseen need output_bytes"),
        ("output_chars = 3", "unknown key 'tools.output_chars'; did you mean 'output_bytes'?"),
    ],
)
def test_a_wrong_key_is_named_when_the_config_is_read(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[[phase]]\nname = "rl"\ngroup_size = 2\ntrajectories = 4\n[tools]\n{text}\n')
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ("no_such_package.caps:f", "'no_such_package.caps:f' can't be had: ModuleNotFoundError: No module named"),
        ("test_caps:nothing", "can't be had: AttributeError"),
        ("test_caps:ANY", "must take (text, limit, tool)"),
        ("test_caps:too_few", "must take (text, limit, tool): too many positional arguments"),
    ],
)
def test_a_function_that_can_not_be_had_is_named_before_the_run(cap: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"^tools\.cap: ") as error:
        load_cap(tools(output_bytes=10, cap=cap))
    assert expected in str(error.value)
    assert load_cap(tools()) is None


def too_few(text: str) -> str:
    return text


# ---- in the loop


class Says:
    """An environment whose n-th step gives the n-th outcome; then it is done."""

    def __init__(self, *outcomes: StepOutcome, opening: Sequence[Message] = (Message.of("user", "go"),)) -> None:
        self.outcomes, self.opening, self.step_number = outcomes, tuple(opening), 0

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    async def reset(self, sandbox: Any) -> tuple[Message, ...]:
        return self.opening

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall(name="t", arguments={"text": text}),)

    async def step(self, calls: Sequence[ToolCall], sandbox: Any) -> StepOutcome:
        self.step_number += 1
        if self.step_number > len(self.outcomes):
            return StepOutcome(results=(), messages=(), done=True)
        return self.outcomes[self.step_number - 1]

    async def rewards(self, sandbox: Any) -> Mapping[str, float]:
        return {"outcome": 1.0}

    def state(self) -> bytes:
        return str(self.step_number).encode()

    def restore(self, state: bytes) -> None:
        self.step_number = int(state)


class Listening(ScriptedEngine):
    """Says something that depends on all that it was given, and remembers that."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(lambda transcript: f"{sha256(transcript.encode()).hexdigest()[:3]}", renderer)
        self.heard: list[Any] = []

    async def generate(self, ids: Any, sampling: Sampling, *, request: str) -> Any:
        self.heard.append(ids.copy())
        return await super().generate(ids, sampling, request=request)


def result(text: str, name: str = "t") -> ToolResult:
    return ToolResult(name=name, status="ok", text=text)


def outcome(*results: ToolResult, say: str = "{}", role: str = "tool", **more: Any) -> StepOutcome:
    messages = tuple(Message.of(role, say.format(one.text)) for one in results)
    return StepOutcome(**{"results": results, "messages": messages, "done": False, **more})


async def run(log: Any, renderer: Renderer, environment: Any, cap: Cap | None = None, **over: Any) -> Ended:
    over = {"trajectory": "t.0", "max_context": 1000, **over}
    return await loop(
        log, renderer, ticket(**over), environment=environment, engine=Listening(renderer), cap=cap
    ).run()  # fmt: skip


def observations(store: Store, ended: Ended) -> list[Any]:
    return [row.meta for row in store.chain(ended.trajectory, ended.head) if row.kind is Kind.OBSERVE]


def stored_contents(paths: RunPaths) -> list[str]:
    found = [path for suffix in (OPEN, CLOSED) for path in segments(paths.log, suffix)]
    return [row.hash for path in found for _, row in read_segment(path) if row.kind is Kind.CONTENT]


LONG = "".join(f"line {number}\n" for number in range(100))


async def test_the_model_sees_the_cut_and_the_store_keeps_the_rest_once(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    cap = load_cap(tools(output_bytes=80, keep_unseen=True))
    script = (outcome(result(LONG), say="Output: {}", role="user"), outcome(result("short")), outcome(result(LONG)))
    first = await run(log, renderer, Says(*script), cap)
    second = await run(log, renderer, Says(*script), cap, trajectory="t.1")
    assert first.status is second.status is State.COMPLETED
    name = sha256(LONG.encode()).hexdigest()
    store = await stored(tmp_path)
    seen = observations(store, first)
    shown = head_tail(LONG.encode(), 80)[0]
    assert seen[0]["parts"] == [{"role": "user", "type": "text", "text": "Output: " + shown}]
    (row,) = seen[0]["results"]
    assert (row["unseen_bytes"], row["cut_reason"]) == (head_tail(LONG.encode(), 80)[1], "cap:head_tail")
    assert row["unseen_hash"] == row["content"] == name and "text" not in row
    assert store.content(name) == LONG.encode()
    assert (seen[1]["results"][0]["cut_reason"], seen[1]["results"][0]["content"]) == ("", "")
    transcript = renderer.transcript(store.trajectory("t.0").ids)
    assert transcript.count(shown) == 2 and LONG not in transcript
    # Four equal outputs: once in the segment, once in the shard.
    assert len(stored_contents(RunPaths(tmp_path))) == 1
    assert not [key for row in (*store.records("t.0"), store.record("", name[:32])) for key in missing(row)]
    with pytest.raises(ValueError, match=r"no content"):
        store.content(name[:32] + "0" * 32)


async def test_without_keep_the_rest_is_length_hash_and_reason(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    cap = load_cap(tools(output_bytes=80))
    before = ToolResult(name="t", status="ok", text=LONG, unseen_bytes=7, cut_reason="last lines", unseen_hash="x")
    ended = await run(log, renderer, Says(outcome(before)), cap)
    (row,) = observations(await stored(tmp_path), ended)[0]["results"]
    assert (
        row["unseen_bytes"] == 7 + head_tail(LONG.encode(), 80)[1] and row["cut_reason"] == "last lines, cap:head_tail"
    )
    assert (row["unseen_hash"], row["content"]) == (sha256(LONG.encode()).hexdigest(), "")
    assert not stored_contents(RunPaths(tmp_path))


async def test_a_tool_message_that_holds_no_results_text_is_cut_as_well(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    cap = load_cap(tools(output_bytes=80, keep_unseen=True))
    upper = StepOutcome(results=(result(LONG),), messages=(Message.of("tool", LONG.upper()),), done=False)
    own_words = StepOutcome(results=(), messages=(Message.of("user", LONG),), done=False)
    ended = await run(log, renderer, Says(upper, own_words), cap, max_context=3000)
    store = await stored(tmp_path)
    first, second, _ = observations(store, ended)
    (part,) = first["parts"]
    assert part["text"] == head_tail(LONG.upper().encode(), 80)[0] and part["cut_reason"] == "cap:head_tail"
    assert store.content(part["content"]) == LONG.upper().encode()
    assert first["results"][0]["text"] == LONG, "what no message holds isn't in the context"
    assert second["parts"][0]["text"] == LONG, "the environment's own words"


async def test_of_outputs_within_outputs_each_is_cut(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    cap = load_cap(tools(output_bytes=80))
    inner = LONG[:200]
    ended = await run(log, renderer, Says(outcome(result(inner, "a"), result(LONG, "b"))), cap)
    (seen, _) = observations(await stored(tmp_path), ended)
    assert [part["text"] for part in seen["parts"]] == [head_tail(text.encode(), 80)[0] for text in (inner, LONG)]
    assert not any("text" in row for row in seen["results"])


def first_word(text: str, limit: int, tool: str) -> str:
    return f"{tool}: {text.split()[0]}"[:limit]


async def first_line(text: str, limit: int, tool: str) -> str:
    await asyncio.sleep(0)
    return text.splitlines()[0]


@pytest.mark.parametrize(("cap", "expected"), [("first_word", "t: line"), ("first_line", "line 0")])
async def test_a_users_function_says_what_the_model_sees(
    log: LogClient, renderer: Renderer, tmp_path: Path, cap: str, expected: str
) -> None:
    ended = await run(
        log, renderer, Says(outcome(result(LONG))), load_cap(tools(output_bytes=80, cap=f"test_caps:{cap}"))
    )
    (seen, _) = observations(await stored(tmp_path), ended)
    assert seen["parts"][0]["text"] == expected
    (row,) = seen["results"]
    assert (row["unseen_bytes"], row["cut_reason"]) == (len(LONG), f"cap:test_caps:{cap}")


def raises(text: str, limit: int, tool: str) -> str:
    raise RuntimeError("out of words")


async def exits(text: str, limit: int, tool: str) -> str:
    raise SystemExit(1)


async def cancels(text: str, limit: int, tool: str) -> str:
    raise asyncio.CancelledError


def none(text: str, limit: int, tool: str) -> Any:
    return None


def more(text: str, limit: int, tool: str) -> str:
    return "€" * limit


@pytest.mark.parametrize(
    ("cap", "message"),
    [
        ("raises", "RuntimeError: out of words"),
        ("exits", "SystemExit: 1"),
        ("cancels", "CancelledError: "),
        ("none", "TypeError: test_caps:none returned NoneType, not str"),
        ("more", "ValueError: test_caps:more returned 240 bytes, tools.output_bytes is 80"),
    ],
)
async def test_a_function_that_fails_is_the_tools_fault_and_no_reward(
    log: LogClient, renderer: Renderer, tmp_path: Path, cap: str, message: str
) -> None:
    ended = await run(
        log, renderer, Says(outcome(result(LONG))), load_cap(tools(output_bytes=80, cap=f"test_caps:{cap}"))
    )
    assert ended.status is State.RETRYING and not ended.rewards
    assert ended.fault == Fault(cause=Cause.TOOL, where="tools.cap", message=message)
    store = await stored(tmp_path)
    assert [row.kind for row in store.records("t.0") if row.kind in (Kind.OBSERVE, Kind.END)] == []


async def test_a_result_that_is_no_text_is_the_environments_fault(log: LogClient, renderer: Renderer) -> None:
    broken = StepOutcome(results=(result(None),), messages=(Message.of("tool", "x"),), done=False)  # type: ignore[arg-type]
    ended = await run(log, renderer, Says(broken), load_cap(tools(output_bytes=80)))
    assert ended.fault is not None and (ended.fault.cause, ended.fault.where) == (Cause.ENVIRONMENT, "find.step")


# ---- media

PICTURE = bytes(range(256)) * 50


class Seeing(Renderer):
    """As one of a model with a processor would: a medium becomes a word."""

    def _render(self, messages: Sequence[Message], generate: bool = True) -> str:
        said = [
            Message.of(message.role, "".join(part.text or f"({part.type})" for part in message.parts))
            for message in messages
        ]
        return super()._render(said, generate)


def picture(role: str = "tool") -> Message:
    return Message(role=role, parts=(Part(text="see: "), Part(type="image", media=PICTURE)))


async def test_media_are_stored_once_and_named(log: LogClient, tiny_model: Path, tmp_path: Path) -> None:
    seeing = Seeing(tiny_model)
    seen = StepOutcome(results=(), messages=(picture(),), done=False)
    last = StepOutcome(results=(), messages=(picture(),), done=True)
    for number in range(2):
        opening = (picture("user"), Message(role="user", parts=(Part(type="image", media=b"other"),)))
        ended = await run(log, seeing, Says(seen, last, opening=opening), trajectory=f"t.{number}")
        assert ended.status is State.COMPLETED
    name, other = (sha256(data).hexdigest() for data in (PICTURE, b"other"))
    store = await stored(tmp_path)
    assert store.content(name) == PICTURE and store.content(other) == b"other"
    assert sorted(stored_contents(RunPaths(tmp_path))) == sorted([name[:32], other[:32]])
    for observed in observations(store, ended):
        assert observed["parts"] == [
            {"role": "tool", "type": "text", "text": "see: "},
            {"role": "tool", "type": "image", "text": "", "media": name},
        ]
    acts = [row.meta for row in store.chain("t.1", ended.head) if row.kind is Kind.ACT]
    assert acts[0]["contents"] == [name, other] and "contents" not in acts[1]
    assert store.contents("t.0") == {name, other}
    assert verify(RunPaths(tmp_path), deep=True).ok
    assert "<u>see: (image)<e>" in seeing.transcript(store.trajectory("t.0").ids)


async def test_media_for_a_model_without_a_processor_are_the_environments_fault(
    log: LogClient, renderer: Renderer
) -> None:
    ended = await run(log, renderer, Says(StepOutcome(results=(), messages=(picture(),), done=False)))
    assert ended.status is State.RETRYING and ended.fault is not None
    assert (ended.fault.cause, ended.fault.where) == (Cause.ENVIRONMENT, "find.step")
    assert "has no processor, takes text only, found 'image'" in ended.fault.message
    opened = await run(log, renderer, Says(opening=(picture("user"),)), trajectory="t.1")
    assert opened.fault is not None and opened.fault.where == "find.reset"
    wrong = StepOutcome(results=(), messages=(Message(role="tool", parts=(Part(media="text"),)),), done=True)  # type: ignore[arg-type]
    ended = await run(log, renderer, Says(wrong), trajectory="t.2")
    assert ended.fault is not None and (ended.fault.cause, ended.fault.where) == (Cause.ENVIRONMENT, "find.step")


# ---- a context in another's place


async def test_a_replaced_context_is_a_new_root(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    short = (Message.of("user", "short"),)
    script = [outcome(result("one")), outcome(result("two"), context=short), outcome(result("three"))]
    engine = Listening(renderer)
    ended = await loop(
        log, renderer, ticket(trajectory="t.0"), environment=Says(*script), engine=engine
    ).run()  # fmt: skip
    store = await stored(tmp_path)
    chain = store.chain("t.0", ended.head)
    roots = [(row.kind, row.step, row.meta["root"]) for row in chain if row.meta.get("root")]
    assert [root[:2] for root in roots] == [(Kind.ACT, 0), (Kind.OBSERVE, 1)]
    assert renderer.transcript(store.record("", roots[1][2]).ids) == "<bos><u>short<e><t>two<e><a>"
    assert np.array_equal(engine.heard[2], store.record("", roots[1][2]).ids)
    # Earlier steps stay on the chain; the newest context is what is trained on.
    assert [row.step for row in chain if row.kind is Kind.ACT] == [0, 1, 2, 3] and ended.num_steps == 4
    sequence = store.trajectory("t.0")
    acts = {row.step: renderer.text(row.ids) for row in chain if row.kind is Kind.ACT}
    assert renderer.transcript(sequence.ids[sequence.sampled]) == f"{acts[2]}<e>{acts[3]}<e>"
    assert len(sequence.ids) == ended.num_tokens and set(sequence.steps.tolist()) == {-1, 2, 3}
    assert verify(RunPaths(tmp_path), deep=True).ok


async def test_a_context_that_goes_on_from_the_stored_one_is_no_new_root(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    """An environment that hands over the whole conversation each time."""
    environment = Conversing(["whole"] * 3)
    ended = await run(log, renderer, environment)
    store = await stored(tmp_path)
    chain = store.chain("t.0", ended.head)
    assert [row.step for row in chain if row.meta.get("root")] == [0], "one root, the opening"
    assert renderer.transcript(store.trajectory("t.0").ids).count("<t>") == 3


async def test_a_context_too_long_is_the_environments_fault(log: LogClient, renderer: Renderer) -> None:
    long = outcome(result("x"), context=(Message.of("user", LONG),))
    ended = await run(log, renderer, Says(long), max_context=300)
    assert ended.status is State.RETRYING and ended.fault is not None and ended.fault.cause is Cause.ENVIRONMENT
    assert "max_context is 300" in ended.fault.message


class Conversing(Says):
    """Keeps the whole conversation, as an agent does, and at some steps hands over what became of it."""

    def __init__(self, script: Sequence[str]) -> None:
        super().__init__()
        self.script, self.said = script, list(self.opening)

    async def step(self, calls: Sequence[ToolCall], sandbox: Any) -> StepOutcome:
        kind = self.script[self.step_number] if self.step_number < len(self.script) else "end"
        self.step_number += 1
        text = f"{self.step_number} {calls[0].arguments['text']}" * (9 if "long" in kind else 1)
        new = () if "silent" in kind else (Message.of("tool", text),)
        if "picture" in kind:
            new = (*new, Message(role="tool", parts=(Part(type="image", media=text[:1].encode()),)))
        self.said.append(Message.of("assistant", str(calls[0].arguments["text"])))
        context = None
        if "whole" in kind:
            context = tuple(self.said)
        elif "shrunk" in kind:
            context = (self.said[0], Message.of("user", f"so far: {self.step_number}"))
        elif "last" in kind:
            context = (self.said[0], *self.said[-2:])
        self.said = [*(context or self.said), *new]
        return StepOutcome(results=(result(text),), messages=new, done=kind == "end", context=context)


KINDS = ["", "long", "picture", "whole", "whole long", "shrunk", "shrunk long", "shrunk silent", "last", "last picture"]


@given(st.lists(st.sampled_from(KINDS), max_size=7), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_anywhere_and_resumed_the_engine_is_given_the_same(
    tiny_model: Path, script: list[str], compacted: bool
) -> None:
    """Whatever is said, cut and replaced: any record may be the last one stored."""
    cap = load_cap(tools(output_bytes=50, keep_unseen=True))
    seeing = Seeing(tiny_model)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(cut_anywhere(Path(folder), seeing, script, cap, compacted))


async def cut_anywhere(folder: Path, renderer: Renderer, script: list[str], cap: Cap | None, compacted: bool) -> None:
    def attempt(log: Any, number: int, **over: Any) -> tuple[Any, Listening]:
        engine = Listening(renderer)
        task = ticket(trajectory="t.0", attempt=number, max_steps=9, max_context=2000, adopt=over.pop("adopt", ""))
        return loop(log, renderer, task, environment=Conversing(script), engine=engine, cap=cap, **over), engine

    async with node_log(folder) as log:
        first, engine = attempt(log, 1)
        ended = await first.run()
        assert ended.status is State.COMPLETED and len(engine.heard) == len(script) + 1
    paths = RunPaths(folder)
    if compacted:
        compact(paths)
    with Store(paths, open_segments=True) as store:
        chain = store.chain("t.0", ended.head)
        tokens = store.trajectory("t.0")
        last = next(row for row in reversed(chain) if row.kind is Kind.ACT)
        assert np.array_equal(tokens.ids, np.concatenate([engine.heard[-1], last.ids]))
        contents = {hash: store.content(hash) for hash in store.contents("t.0")}
    async with node_log(folder, "n2") as log:
        for cut in range(1, len(chain)):
            head = chain[cut - 1].hash
            with Store(paths, open_segments=True) as store:
                history = history_of(store, "t.0", head)
            again, resumed = attempt(log, 1 + cut, adopt=head, history=history)
            other = await again.run()
            assert (other.status, other.num_tokens, other.num_sampled) == (
                ended.status, ended.num_tokens, ended.num_sampled,
            )  # fmt: skip
            done = sum(row.kind is Kind.ACT for row in chain[:cut])
            assert [one.tolist() for one in resumed.heard] == [one.tolist() for one in engine.heard[done:]], cut
    with Store(paths) as store:
        found = store.sequence("t.0", other.head, 1.0)
        assert all(np.array_equal(getattr(found, name), getattr(tokens, name)) for name in ("ids", "sampled", "steps"))
        assert {hash: store.content(hash) for hash in store.contents("t.0")} == contents
    names = stored_contents(paths)
    assert len(names) <= len(set(names)) * (1 if compacted else 2), "once per node"
    assert verify(paths, deep=True).ok
