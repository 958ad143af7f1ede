"""Caps: what of a tool's output the model sees where it is longer than `tools.output_bytes`.

Owns the cut that ships (head and tail), and finding and calling a user's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from typing import Any, TypeVar

from hpcrl.config import Tools
from hpcrl.types import ConfigError, Message, Part, StepOutcome, ToolResult

# (text, most bytes that the model may see, tool's name) -> what it sees: a cut, a summary, …
CapFunction = Callable[[str, int, str], str | Awaitable[str]]
Guard = Callable[[], AbstractContextManager[None]]
Whole = TypeVar("Whole", ToolResult, Part)

_PAIR = re.compile(rb"\xed[\xa0-\xaf].\xed[\xb0-\xbf].", re.DOTALL)  # surrogates, as `encoded` writes them


def encoded(text: str) -> bytes:
    """UTF-8; a lone surrogate, which that has no bytes for, becomes the three that it would have."""
    return text.encode("utf-8", "surrogatepass")


def head_tail(data: bytes, limit: int) -> tuple[str, int]:
    """Beginning and end of a text (`encoded`), a line between them that says how much was left out, together at most
    `limit` bytes; and how many were left out. No code point and no pair of surrogates is split.

    Where the line itself has no room the beginning stands alone.
    """
    room = limit - len(_marker(len(data)))
    start, stop = (room + 1) // 2, len(data) - room // 2
    if room <= 0:
        start, stop = limit, len(data)
    while _splits(data, start):
        start -= 1
    while _splits(data, stop):
        stop += 1
    marker = _marker(stop - start) if room > 0 else b""
    return (data[:start] + marker + data[stop:]).decode("utf-8", "surrogatepass"), stop - start


def _marker(count: int) -> bytes:
    return f"\n[... {count} bytes left out ...]\n".encode()


def _splits(data: bytes, at: int) -> bool:
    if not 0 < at < len(data):
        return False
    return data[at] & 0xC0 == 0x80 or (at >= 3 and _PAIR.match(data, at - 3) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """`[tools]` of a config, its function found."""

    name: str
    limit: int  # bytes
    keep: bool  # the whole output goes to the store
    function: CapFunction | None  # None: head_tail

    async def apply(self, outcome: StepOutcome, guard: Guard) -> tuple[StepOutcome, list[bytes]]:
        """As the model may see it, and the wholes that the store is to keep: a result's text that is too long is cut
        wherever a message holds it, and so is a tool message that holds none.

        `guard`: runs the cap's function, and labels what it raises; what is `outcome`'s doing is raised as it is.
        """
        wholes: list[bytes] = []

        async def cut(given: Whole, tool: str) -> Whole:
            whole = encoded(given.text)
            if len(whole) <= self.limit:
                return given
            with guard():
                shown, unseen = await self._shown(whole, given.text, tool)
            if self.keep:
                wholes.append(whole)
            digest = sha256(whole).hexdigest()
            return dataclasses.replace(
                given, text=shown, unseen_bytes=given.unseen_bytes + unseen, unseen_hash=digest,
                cut_reason=", ".join(filter(None, (given.cut_reason, f"cap:{self.name}"))),
                content=digest if self.keep else "",
            )  # fmt: skip

        async def each(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple([
                dataclasses.replace(message, parts=tuple([await part(one, message.role) for one in message.parts]))
                for message in messages
            ])  # fmt: skip

        async def part(one: Part, role: str) -> Part:
            text = one.text
            for whole in sorted(cuts, key=len, reverse=True):  # the longest first: another may be within
                text = text.replace(whole, cuts[whole])
            if text == one.text and role == "tool":
                return await cut(one, "")
            return dataclasses.replace(one, text=text)

        messages = (*(outcome.context or ()), *outcome.messages)
        texts = [one.text for message in messages for one in message.parts]
        results: list[ToolResult] = []
        cuts: dict[str, str] = {}
        for result in outcome.results:
            results.append(await cut(result, result.name) if any(result.text in text for text in texts) else result)
            if results[-1] is not result:
                cuts[result.text] = results[-1].text
        capped = dataclasses.replace(
            outcome, results=tuple(results), messages=await each(outcome.messages),
            context=None if outcome.context is None else await each(outcome.context),
        )  # fmt: skip
        return capped, wholes

    async def _shown(self, whole: bytes, text: str, tool: str) -> tuple[str, int]:
        """What the model sees in place of `text` (`encoded` as `whole`), and how many bytes it doesn't see.

        Raises what the function raises; TypeError, ValueError when it returns no str, or too much.
        """
        if self.function is None:
            return head_tail(whole, self.limit)
        made = self.function(text, self.limit, tool)
        shown = await made if inspect.isawaitable(made) else made
        if not isinstance(shown, str):
            raise TypeError(f"{self.name} returned {type(shown).__name__}, not str")
        if (size := len(encoded(shown))) > self.limit:
            raise ValueError(f"{self.name} returned {size} bytes, tools.output_bytes is {self.limit}")
        return shown, len(whole)


def load_cap(tools: Tools) -> Cap | None:
    """The cap that `[tools]` asks for; None for none. Raises ConfigError when its function can't be had or called."""
    if not tools.output_bytes:
        return None
    function: CapFunction | None = None
    if ":" in tools.cap:
        module, _, path = tools.cap.partition(":")
        try:
            found: Any = reduce(getattr, path.split("."), importlib.import_module(module))
        except Exception as error:  # a module may raise anything while it is imported
            raise ConfigError(f"tools.cap: {tools.cap!r} can't be had: {type(error).__name__}: {error}") from error
        try:
            inspect.signature(found).bind("", 0, "")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tools.cap: {tools.cap!r} must take (text, limit, tool): {error}") from error
        function = found
    return Cap(name=tools.cap, limit=tools.output_bytes, keep=tools.keep_unseen, function=function)
