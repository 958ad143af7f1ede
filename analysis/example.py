"""From a run folder to tables and a plot: `python -m hpcrl_analysis.example RUN > example.md`. Rows come in the shards'
order, which is none in time: what is about time goes by `wall`."""

import sys

from hpcrl_analysis import calls, frame
from matplotlib.figure import Figure

trajectories = frame(sys.argv[1])  # a Dask DataFrame: nothing is read before `compute`
ended = trajectories[trajectories.status != "open"]
ended = ended.assign(minute=((ended.wall - ended.wall.min()) // 60).astype(int))
ended = ended.assign(tasks=ended.phase + " " + ended.task_kind)
success = ended.groupby(["minute", "tasks"]).success.mean().compute().unstack().sort_index()
tokens = ended.groupby("phase").num_tokens.agg(["count", "mean", "min", "max"]).compute()
failures = calls(sys.argv[1]).groupby(["name", "status"]).size().compute().unstack(fill_value=0)
axes = Figure(figsize=(7, 3.5), layout="constrained").subplots()
success.plot(ax=axes, marker=".", ylabel="success").figure.savefig("example.png", dpi=110)
for title, table in {"Success by minute": success, "Tokens": tokens, "Tool calls": failures}.items():
    print(f"## {title}\n\n```\n{table.round(3).to_string()}\n```\n")
print("![success by minute and kind of task](example.png)")
