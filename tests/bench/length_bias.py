"""Whether trajectories that finished in a disturbed run are as long as those of one that nobody disturbed.

    python tests/bench/length_bias.py DISTURBED UNDISTURBED [IN_FLIGHT]

Runs of one config and seed begin the same groups in the same order. Of the groups that both have come to, but for the
last IN_FLIGHT, which may be under way (default 64), it compares the lengths of the trajectories that finished, in steps
and tokens: two-sample Kolmogorov-Smirnov. A run that loses its long ones to each disturbance would have a p near zero.
Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scipy.stats import ks_2samp

from hpcrl.layout import RunPaths
from hpcrl.store.index import Store

FINISHED = ("COMPLETED", "TRUNCATED")


def compare(disturbed: Path, undisturbed: Path, in_flight: int = 64) -> dict[str, float]:
    """Raises ValueError when the two have too little in common to tell."""
    frames = []
    for run in (disturbed, undisturbed):
        with Store(RunPaths.of(run), open_segments=True) as store:
            found = store.query()
        found = found[found.kind.isin(("train", "expert")) & found.status.isin(FINISHED)]
        frames.append(found.assign(number=found.group.str.rsplit("n", n=1).str[1].astype(int)))
    groups = min(frame.number.max() for frame in frames) - in_flight
    one, other = (frame[frame.number < groups] for frame in frames)
    if min(len(one), len(other)) < 100:
        raise ValueError(f"{len(one)} and {len(other)} trajectories of the first {groups} groups: too few to tell")
    result = {"groups": int(groups), "disturbed": len(one), "undisturbed": len(other)}
    for name in ("num_steps", "num_tokens"):
        result[f"{name}_mean"] = float(one[name].mean())
        result[f"{name}_mean_undisturbed"] = float(other[name].mean())
        result[f"{name}_p"] = float(ks_2samp(one[name], other[name]).pvalue)
    return result


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))))
