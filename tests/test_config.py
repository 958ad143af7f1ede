"""The config tree: every shipped file parses; what is wrong is named with what would be right."""

from pathlib import Path

import pytest

from hpcrl import config
from hpcrl.types import ConfigError

BASE = """
name = "base"
[[phase]]
name = "rl"
group_size = 8
trajectories = 128
"""


def write(folder: Path, text: str | bytes, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_parse(path: Path) -> None:
    settings = config.load(path)
    assert settings.phase and settings == config.load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sed = 1", "unknown key 'sed'; did you mean 'seed'?"),
        ("[learner]\ncheckpoint-every = 3", "unknown key 'learner.checkpoint-every'; did you mean 'checkpoint_every'?"),
        ('[learner]\nranks = "2"', "learner.ranks"),
        ("[learner]\nranks = 0", "learner.ranks: input should be greater than 0, found 0"),
        ("[sampling]\ntemperature = nan", "sampling.temperature: input should be a finite number"),
        ("learner = 3", "learner"),
        ("[[rollout]]\ngpuz = 1", "unknown key 'rollout.0.gpuz'; did you mean 'gpus'?"),
        ('[launch]\nports = "80-90"', "ports must be LOW-HIGH within 1024-65535"),
        ('[launch]\nports = "high"', "launch.ports"),
        ('[[phase]]\nname = "x"', "set at least one trigger"),
        ('[[phase]]\nname = "x"\ntrajectories = 8\ngroup_size = 1', "group_size must be at least 2"),
        ('[[sandbox]]\nname = "a"\n[[sandbox]]\nname = "a"', "[[sandbox]] names must differ, found 'a' twice"),
        ("[[sandbox]]\njobs = 5\nmaximum_jobs = 4", "jobs (5) must be within minimum_jobs (1) and maximum_jobs (4)"),
        ('[launch]\nexecutor = "steps"\n[[sandbox]]\nmaximum_jobs = 2', "maximum_jobs needs a live fleet"),
        ('[[sandbox]]\nmaximum_jobs = 2\n[[sandbox]]\nname = "b"', "maximum_jobs needs a single pool"),
        ("[sampling]\nmax_context = 99999", "sampling.max_context (99999) exceeds max_model_len (2048)"),
        ('name = "a b"', "name"),
        ("x = = 1", "not a TOML file"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, text: str, expected: str) -> None:
    whole = text + BASE.replace('name = "base"', "") if 'name = "a b"' in text or "x =" in text else BASE + text
    if not text.startswith(("[", "name", "x")):
        whole = text + "\n" + BASE
    with pytest.raises(ConfigError) as error:
        config.load(write(tmp_path, whole))
    assert expected in str(error.value), str(error.value)
    assert "\n" not in str(error.value) or "x = =" in text


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert config.load(path).name == "base"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such config file"):
        config.load(tmp_path / "none.toml")


def test_include_overlays_by_table_and_name(tmp_path: Path) -> None:
    write(tmp_path, BASE, "base.toml")
    path = write(tmp_path, 'include = "base.toml"\nname = "over"\n[[phase]]\nname = "rl"\nlr = 0.5\n')
    settings = config.load(path)
    assert (settings.name, settings.phase[0].lr, settings.phase[0].group_size) == ("over", 0.5, 8)


def test_include_of_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="includes itself"):
        config.load(write(tmp_path, 'include = "run.toml"\n' + BASE))


def test_set_reaches_any_key(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    sets = ["seed=3", "rl.lr=0", "phase.rl.updates=7", "rollout.jobs=2", "learner.betas=[0.8, 0.9]", "model.source=/m"]
    settings = config.load(path, sets)
    assert settings.seed == 3
    assert (settings.phase[0].lr, settings.phase[0].updates) == (0.0, 7)
    assert settings.rollout[0].jobs == 2
    assert settings.learner.betas == (0.8, 0.9)
    assert settings.model.source == "/m"


ODD_SETS = [
    "learner.betas=[1]",
    "rollout.².jobs=1",
    "seed=" + "9" * 5000,
    "x=" + "[" * 3000,
    "model." + "x." * 3000 + "y=1",
]


@pytest.mark.parametrize("text", ["seed", "=3", "rl.lrr=1", "nope.x=1", "seed.x=1", "phase.other.lr=1", *ODD_SETS])
def test_wrong_set_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        config.load(write(tmp_path, BASE), [text])


def test_resume_refuses_a_changed_fixed_key_with_both_values(tmp_path: Path) -> None:
    old = config.load(write(tmp_path, BASE))
    config.check_resume(old, config.with_sets(old, ["rollout.jobs=3", "store.poll_s=1"]))
    with pytest.raises(ConfigError, match=r"phase\.rl\.lr is fixed for this run: it was 1e-06, now 0\.5"):
        config.check_resume(old, config.with_sets(old, ["rl.lr=0.5"]))


def test_resolved_config_comes_back_equal(tmp_path: Path) -> None:
    settings = config.load(Path("configs/quickstart.toml"), ["seed=4"])
    path = write(tmp_path, config.dump(settings), "config.json")
    assert config.load_resolved(path) == settings
