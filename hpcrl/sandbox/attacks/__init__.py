"""The table of attacks on a sandbox: hostile programs, one property each. Data alone: `judge.py` runs and judges them.

    ATTACKS = (Attack(name, tries, program, …), …)

A program is Python that judges itself, by `won(evidence)` or `lost(why)`; an OSError that it doesn't catch is `lost`.
What only the host can see is a `witness`'s: it looks in the same way at a sandbox and at a bare run, which is the same
program as a subprocess of an ordinary user. There the attack has to succeed, or its failure inside would mean nothing.
Bare runs are harmless: bounded amounts, own folders, and victims that the judge has set up.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from hpcrl.sandbox.attacks.amounts import AMOUNTS, BOMBS
from hpcrl.sandbox.attacks.files import FILES
from hpcrl.sandbox.attacks.host import HOST
from hpcrl.sandbox.attacks.kernel import KERNEL
from hpcrl.sandbox.attacks.leftovers import LEFT
from hpcrl.sandbox.attacks.network import NETWORK
from hpcrl.sandbox.attacks.runner import RUNNER
from hpcrl.sandbox.attacks.words import Attack
from hpcrl.types import ConfigError

ATTACKS: tuple[Attack, ...] = (*RUNNER, *AMOUNTS, *BOMBS, *FILES, *HOST, *NETWORK, *KERNEL, *LEFT)


def named(names: Collection[str]) -> tuple[Attack, ...]:
    """The attacks of these names, all where there are none. Raises ConfigError for a name that is nobody's."""
    known = [attack.name for attack in ATTACKS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or known
            raise ConfigError(f"no attack {name!r}; did you mean {near[0]!r}?")
    return tuple(attack for attack in ATTACKS if not names or attack.name in names)
