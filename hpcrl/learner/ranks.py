"""The learner's ranks as a group: the process group, the device, and the channel by which rank 0 hands out plans.

Waiting for data happens on the channel (a TCP store), never in a collective: rollouts may take longer than any
watchdog's patience, and a collective that waits for them would be killed.
"""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcrl.node import task_place
from hpcrl.types import ConfigError

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05  # between two looks for a plan


class Ranks:
    """One rank's membership. `listener`: rank 0's, at that address; without it one is made, on all addresses.

    Raises ConfigError when the port is taken or a GPU is asked for that isn't there.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        port: int,
        *,
        gpus: int,
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self.device = self._device(gpus)
        timeout = timedelta(seconds=timeout_s)
        try:
            fd = listener.detach() if listener is not None else None
            store = TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, master_listen_fd=fd)
        except dist.DistNetworkError as error:
            what = (
                f"can't listen on port {port} of {address}" if rank == 0 else f"can't reach rank 0 at {address}:{port}"
            )
            raise ConfigError(f"learner: {what}: {str(error).splitlines()[0]}") from error
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=timeout
        )
        self._plans = PrefixStore("plan", store)
        self._next = 0

    @staticmethod
    def _device(gpus: int) -> torch.device:
        if not gpus:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(f"learner.gpus is {gpus}, but no CUDA GPU is usable here; set learner.gpus=0 for the CPU")
        # A site may show each task its own GPU alone: then that is number 0, whatever the task's place.
        device = torch.device("cuda", task_place() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.world,))

    def hand_out(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: give the next plan to the others."""
        self._plans.set(str(self._next), json.dumps(plan))
        if self._next >= 2:  # the others have met us in a collective since
            self._plans.delete_key(str(self._next - 2))
        self._next += 1
        return plan

    def receive(self) -> dict[str, Any]:
        """The others: wait, for as long as it takes, for the next plan. Raises when rank 0 is gone."""
        key = str(self._next)
        pause_s = SHORTEST_PAUSE_S
        # Asking again and again, since a blocking wait that times out prints a warning each time (torch 2.13).
        while not self._plans.check([key]):
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
        self._next += 1
        plan: dict[str, Any] = json.loads(self._plans.get(key))
        return plan

    def share(self, value: Any) -> Any:
        """What rank 0 passes, on every rank. A collective."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. A collective."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place. A collective."""
        dist.all_reduce(values)
        return values

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
