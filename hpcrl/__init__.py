"""hpcrl: reinforcement learning of LLM agents on Slurm clusters."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Run", "__version__"]

if TYPE_CHECKING:
    from hpcrl.run import Run


def __getattr__(name: str) -> Any:
    if name == "Run":  # on demand: `import hpcrl` stays light
        from hpcrl.run import Run

        return Run
    raise AttributeError(name)
