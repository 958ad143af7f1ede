"""Messages to tokens: equal to the template's own ids at the start, and a context that only ever grows after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.types import ConfigError, Message, Part, Sampling

# SmolLM2's: a default system message, a newline after the end token, no BOS.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's habits: tool results are user turns, thinking stays in the turns after the last question alone.
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- text + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# A BOS of its own, which a tokenizer that adds one must not double.
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "bos": WITH_BOS}


def make_chat_model(folder: Path, template: str) -> Path:
    """A byte-level BPE tokenizer with merges, learnt from a few words, that adds a BOS to whatever it is given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello hello user assistant system tool\n helpful thinking"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Renderer:
    return Renderer(tiny_model)


@pytest.fixture(scope="module", params=["tiny", *TEMPLATES])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tiny":
        return tiny_model
    return make_chat_model(tmp_path_factory.mktemp(request.param) / "model", TEMPLATES[request.param])


def own_ids(model: Path, messages: list[Message]) -> list[int]:
    rows = [{"role": message.role, "content": message.text} for message in messages]
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    ids = tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list)
    return ids


OPENINGS = [
    [Message.of("user", "hello, find 7")],
    [Message.of("system", "be terse"), Message.of("user", "hello\n")],
    [Message.of("user", "say <|im_end|> and <e>"), Message.of("assistant", "hello"), Message.of("user", "€ again")],
]


@pytest.mark.parametrize("messages", OPENINGS)
def test_start_is_the_templates_own(model: Path, messages: list[Message]) -> None:
    ids = Renderer(model).start(messages)
    assert ids.dtype == np.int32
    assert ids.tolist() == own_ids(model, messages)


def test_three_turns_equal_the_templates_own_rendering(model: Path) -> None:
    """With acts that the tokenizer would write alike, the grown context is what the template gives for the whole."""
    renderer = Renderer(model)
    messages = [Message.of("user", "hello")]
    context = renderer.start(messages).tolist()
    for turn in range(3):
        said = f"hello user {turn}"
        context += renderer.act(said).tolist()
        observed = [Message.of("user", f"helpful {turn}")]
        context += renderer.extend(observed, after_stop=True).tolist()
        messages += [Message.of("assistant", said), *observed]
    assert context == own_ids(model, messages)


def test_an_act_cut_by_length_is_closed(model: Path) -> None:
    renderer = Renderer(model)
    observed = [Message.of("tool", "233"), Message.of("user", "go on")]
    stopped = renderer.extend(observed, after_stop=True).tolist()
    assert renderer.extend(observed, after_stop=False).tolist() == [renderer.stop_ids[0], *stopped]


def test_sampled_ids_are_kept_as_they_are(tmp_path: Path) -> None:
    """`he` + `llo` stay two tokens where the tokenizer would write one, over three turns."""
    renderer = Renderer(make_chat_model(tmp_path / "model", CHATML))
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    sampled = tokenizer.convert_tokens_to_ids(["h", "e", "l", "l", "o"])
    assert renderer.act("hello").tolist()[:-1] != sampled
    context = renderer.start([Message.of("user", "hello")]).tolist()
    for _ in range(3):
        context += [*sampled, renderer.stop_ids[0]]
        context += renderer.extend([Message.of("tool", "hello")], after_stop=True).tolist()
        assert renderer.text(sampled) == "hello"
    own = own_ids(tmp_path / "model", [Message.of("user", "hello")])
    assert context[: len(own)] == own
    assert "".join(map(str, sampled)) in "".join(map(str, context))
    assert renderer.transcript(context).count("<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>tool") == 3


def test_thinking_of_earlier_turns_stays(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", THINKING)
    renderer = Renderer(model)
    question = Message.of("user", "hello")
    context = renderer.start([question]).tolist()
    said = "<think>\nhm\n</think>\n\nlook"
    context += renderer.act(said).tolist()
    grown = context + renderer.extend([Message.of("user", "more")], after_stop=True).tolist()
    assert "<think>\nhm" in renderer.transcript(grown)
    # The template itself would have dropped it: its rendering has no such prefix.
    own = own_ids(model, [question, Message.of("assistant", said), Message.of("user", "more")])
    assert own[: len(context)] != context
    tail = renderer.extend([Message.of("tool", "42")], after_stop=True)
    assert renderer.transcript(tail) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_ids_hold_the_turns_end_and_the_models(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", CHATML)
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 17]}')
    assert Renderer(model).stop_ids == (3, 0, 17)  # <|im_end|>, the tokenizer's eos, one that only the model names


def test_text_and_transcript_of_the_tiny_model(tiny: Renderer) -> None:
    ids = tiny.start([Message.of("user", "find N5")])
    assert tiny.transcript(ids) == "<bos><u>find N5<e><a>"
    assert tiny.text(ids) == "find N5"
    assert tiny.transcript(tiny.extend([Message.of("tool", "a  b\n")], after_stop=True)) == "<t>a  b\n<e><a>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not show what the assistant said"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_templates_that_cannot_serve(tiny_model: Path, template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Renderer(tiny_model, template)


def test_folders_that_cannot_serve(tmp_path: Path, tiny: Renderer) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Renderer(tmp_path)
    with pytest.raises(ConfigError, match="no chat_template"):
        Renderer(make_chat_model(tmp_path / "model", ""))
    with pytest.raises(ConfigError, match="text only"):
        tiny.start([Message(role="user", parts=(Part(type="image", media="00"),))])


async def test_scripted_engine_keeps_the_contract(tiny: Renderer) -> None:
    heard: list[str] = []

    def act(transcript: str) -> str:
        heard.append(transcript)
        return "cat N5"

    engine = ScriptedEngine(act, tiny)
    ids = tiny.start([Message.of("user", "find N5")])
    got = await engine.generate(ids, Sampling(temperature=1.0, max_tokens=14), request="t/0")
    assert heard == ["<bos><u>find N5<e><a>"]
    assert (tiny.transcript(got.ids), got.finish_reason) == ("cat N5<e>", "stop")
    assert got.ids.tolist() == tiny.act("cat N5").tolist()
    assert (got.logprobs.tolist(), got.spans[0].version, got.spans[0].stop) == ([0.0] * 7, -1, 7)
    cut = await engine.generate(ids, Sampling(temperature=1.0, max_tokens=3), request="t/1")
    assert (tiny.transcript(cut.ids), cut.finish_reason) == ("cat", "length")
