"""Messages to tokens and sampled tokens to text: the only place that knows a tokenizer or a chat template.

Tokens in, tokens out: what the policy sampled is never rendered again. A context grows by appending alone:

    start(messages) | sampled ids | extend(messages) | sampled ids | extend(messages) | ...

`extend` gives what a template puts between one assistant turn and the next. It is cut out of a rendering around a fixed
dummy turn, so a template that rewrites earlier turns (drops their thinking, say) can't change the stored context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hpcrl.types import ConfigError, Int32Array, Message

# Stands for the assistant's turn in a dummy history; must survive a template's trimming and filters as it is.
DUMMY = "hpcrl0dummy0turn"


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as transformers loads it. Raises OSError, ValueError or KeyError when it can't."""
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        # The whole tokenizer is in that file. AutoTokenizer would import torch and every model's class: 10 s of CPU.
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


class Renderer:
    """One model's tokenizer and chat template. Not thread safe (tokenizers aren't); make one per process."""

    def __init__(self, model: Path | str, chat_template: str | None = None) -> None:
        """Read the tokenizer of the Hugging Face folder `model`; `chat_template` replaces its own.

        Raises ConfigError: no tokenizer, no template, or a template that hides what the assistant said.
        """
        self._folder = Path(model)
        try:
            self._tokenizer: Any = load_tokenizer(self._folder)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{model}: no tokenizer that can be read: {str(error).splitlines()[0]}") from error
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{model}: its tokenizer has no chat_template; add one to tokenizer_config.json")
        closing = self._after_dummy(())
        # Not all_special_ids: that misses special tokens which no named role (eos, pad, …) was given to.
        special = {index for index, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._closer: int | None = closing[0] if closing and closing[0] in special else None
        self.stop_ids: tuple[int, ...] = self._stop_ids()
        if not self.stop_ids:
            raise ConfigError(f"{model}: neither tokenizer nor generation_config.json names an end-of-turn token")

    def start(self, messages: Sequence[Message]) -> Int32Array:
        """The context that a trajectory opens with, generation prompt included: the template's own ids, [T]."""
        return np.asarray(self._ids(self._render(messages)), np.int32)

    def extend(self, messages: Sequence[Message], *, after_stop: bool) -> Int32Array:
        """The ids, [T], that follow an assistant turn: its close, `messages`, the next generation prompt.

        after_stop: the turn ended by a sampled stop token, which is in the context; else (cut by length) the template's
        own closing token is put there.
        """
        ids = self._after_dummy(messages)
        if after_stop and ids and ids[0] in self.stop_ids:
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def act(self, text: str) -> Int32Array:
        """The ids, [T], that say `text` as an assistant turn, stop token included: for scripted policies."""
        return np.asarray([*self._ids(text), self.stop_ids[0]], np.int32)

    def text(self, ids: Int32Array | Sequence[int]) -> str:
        """What sampled ids say, without special tokens."""
        return self._decode(ids, skip=True)

    def transcript(self, ids: Int32Array | Sequence[int]) -> str:
        """A context as text, special tokens visible."""
        return self._decode(ids, skip=False)

    def _decode(self, ids: Int32Array | Sequence[int], *, skip: bool) -> str:
        row = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text = self._tokenizer.decode(row, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        # The template has already put every special token, BOS too, where it belongs.
        if self._fast is not None:  # the tokenizers library itself: a tenth of what transformers' call costs
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], generate: bool = True) -> str:
        rows = []
        for message in messages:
            for part in message.parts:
                if part.type != "text":
                    raise ConfigError(
                        f"{self._folder}: has no processor, takes text only, found {part.type!r} in a part"
                    )
            rows.append({"role": message.role, "content": message.text})
        try:
            text = self._tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=generate)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"{self._folder}: its chat template refuses the roles {roles}: {error}") from error
        assert isinstance(text, str)
        return text

    def _after_dummy(self, messages: Sequence[Message]) -> list[int]:
        """Ids of all that the template puts after the assistant's turn of a dummy history followed by `messages`."""
        history = (Message.of("user", "?"), Message.of("assistant", DUMMY))
        # Without new messages a generation prompt would open a second assistant turn.
        text = self._render((*history, *messages), generate=bool(messages))
        _, found, after = text.partition(DUMMY)
        if not found:
            raise ConfigError(f"{self._folder}: its chat template does not show what the assistant said")
        return self._ids(after)

    def _stop_ids(self) -> tuple[int, ...]:
        """The template's own end of turn first, then what the model folder calls an end."""
        found: list[int] = [] if self._closer is None else [self._closer]
        if self._tokenizer.eos_token_id is not None:
            found.append(int(self._tokenizer.eos_token_id))
        path = self._folder / "generation_config.json"
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            found.extend(eos if isinstance(eos, list) else [] if eos is None else [eos])
        return tuple(dict.fromkeys(found))
