"""The pages name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpcrl.config import Config, Table

ROOT = Path(__file__).parents[1]


def tables(kind: type[Table]) -> dict[str, type[Table]]:
    """Config's tables by their heading: `[store]`, `[[phase]]`."""
    found: dict[str, type[Table]] = {}
    for name, info in kind.model_fields.items():
        inner: Any = info.annotation
        many = getattr(inner, "__args__", None)
        table = many[0] if many else inner
        if isinstance(table, type) and issubclass(table, Table):
            found[f"[[{name}]]" if many else f"[{name}]"] = table
    return found


def test_the_config_page_names_every_key() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    sections = dict(re.findall(r"## `(.+?)`\n(.*?)(?=\n## |\Z)", page, re.DOTALL))
    known = tables(Config)
    assert set(sections) == set(known)
    for heading, table in known.items():
        named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", sections[heading], re.MULTILINE))))
        assert named == set(table.model_fields), heading
