"""Environments by name: the entry points of the group `hpcrl.environments`, in any installed package."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from hpcrl.types import ConfigError, EnvironmentFamily

GROUP = "hpcrl.environments"
_NEEDED = ("name", "needs_sandbox", "tasks", "make", "expert")


def load_family(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentFamily:
    """The environment that `environment.name` names, set up with `environment.options`.

    A module that takes options has `configure(options) -> EnvironmentFamily`, which refuses what it doesn't know.
    Raises ConfigError: unknown name (with the known ones), an environment that can't be imported, options refused.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        near = difflib.get_close_matches(name, points, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(points)) or "none; is the package installed?"
        raise ConfigError(f"environment.name: no environment {name!r}; {hint}known: {known}")
    try:
        found = points[name].load()
    except ImportError as error:
        raise ConfigError(f"environment.name: {name!r} ({points[name].value}) can't be imported: {error}") from error
    configure = getattr(found, "configure", None)
    if configure is not None:
        found = configure(dict(options or {}))
    elif options:
        raise ConfigError(f"environment.options: {name!r} takes no options, found: {', '.join(options)}")
    missing = [attribute for attribute in _NEEDED if not hasattr(found, attribute)]
    if missing:
        raise ConfigError(f"environment.name: {name!r} ({points[name].value}) lacks {', '.join(missing)}")
    family: EnvironmentFamily = found
    return family
