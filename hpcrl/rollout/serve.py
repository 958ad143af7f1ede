"""vLLM's API server for a CPU engine with one thread: starts in a third of the time, with 1.5 GB less memory.

vLLM's core and worker are spawned on a CPU, so that each can set up OpenMP for itself, and each imports all of vLLM and
torch again, as does a helper that only looks at the model's class: minutes on a busy machine. With one thread there is
no OpenMP team that a fork could break, and no CUDA context: so they are forked here, from a process that has it all.

Run as `python -m hpcrl.rollout.serve` with the server's own options. Patches vllm 0.32; can go when vLLM lets a CPU
platform choose fork (VLLM_WORKER_MULTIPROC_METHOD is overwritten in platforms/cpu.py).
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys


def main() -> None:
    import vllm.model_executor.models.registry as registry
    import vllm.utils.system_utils as system_utils

    # Before any other module of vLLM takes the name from there.
    assert hasattr(system_utils, "get_mp_context") and hasattr(registry, "_run_in_subprocess"), "not vllm 0.32's shape"
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    registry._run_in_subprocess = lambda function: function()
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
