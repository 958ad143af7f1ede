"""What this node is to others: the address by which they reach it, and which life of which job we are in."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import time

import psutil

from hpcrl.config import Config, seconds_of
from hpcrl.layout import node_name
from hpcrl.types import ConfigError

logger = logging.getLogger(__name__)

SCONTROL_S = 15.0
CLOSING_S = 20.0  # that a rollout node takes for closing its log and ending its engines


def job_id() -> str:
    """Of the job that this process is part of; without one, the pid."""
    names = ("SUBMITIT_LOCAL_JOB_ID", "HPCRL_JOB", "SLURM_JOB_ID")
    return next((os.environ[name] for name in names if os.environ.get(name)), str(os.getpid()))


def job_life() -> str:
    """The job, and which of its lives: a requeued job keeps its id."""
    return f"{job_id()}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"


def node_id(role: str) -> str:
    """Names a role's process on this node, in this life of its job where that is Slurm's: what it owns, such as a log,
    is no later one's."""
    name = f"{node_name()}-{role}"
    return f"{name}-j{job_life()}" if "SLURM_JOB_ID" in os.environ else name


def job_of(node: str) -> str:
    """The id of the Slurm job that a node_id was made in; "" where there was none."""
    found = re.search(r"-j([^-]+)\.\d+$", node)
    return found[1] if found else ""


def is_earlier_life(node: str) -> bool:
    """Whether a node_id is of this job's, before it was requeued: Slurm has seen that end."""
    life = re.search(r"\.(\d+)$", node)
    return job_of(node) == job_id() and life is not None and int(life[1]) < int(job_life().rpartition(".")[2])


def asked() -> dict[str, int | None]:
    """What Slurm was asked for: CPUs of this task, bytes of memory on this node. None where it says nothing of it."""
    cpus, on_node, of_node, of_cpu = (
        int(text) if (text := os.environ.get(f"SLURM_{name}", "")).isdigit() else None
        for name in ("CPUS_PER_TASK", "CPUS_ON_NODE", "MEM_PER_NODE", "MEM_PER_CPU")
    )
    mib = of_node or (of_cpu * on_node if of_cpu and on_node else None)  # 0: all of the node
    return {"asked_cpus": cpus, "asked_bytes": mib << 20 if mib else None}


def task_rank() -> int:
    return int(os.environ.get("SUBMITIT_LOCAL_GLOBALID") or os.environ.get("SLURM_PROCID") or 0)


def task_place() -> int:
    """Which of its node's tasks this is, from 0 on."""
    return int(os.environ.get("SUBMITIT_LOCAL_LOCALID") or os.environ.get("SLURM_LOCALID") or 0)


def ends_at(config: Config, role: str, index: int) -> float:
    """When this process's allocation ends, in seconds since the epoch: as Slurm's environment says, else scontrol, else
    by the limit that was asked for, from now on. Infinite outside of one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job or config.launch.executor != "slurm":  # of an allocation that is around all roles control sees the end
        return math.inf
    if (given := os.environ.get("SLURM_JOB_END_TIME", "")).isdecimal():  # since 23.02
        return float(given)
    said = _scontrol("job", job, "EndTime")
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))
    if said == "Unknown":
        return math.inf
    return time.time() + seconds_of(config.slurm_of(role, index).time)


@functools.cache
def address(interface: str) -> str:
    """The IPv4 address by which other nodes reach this one: that of the interface, where one is named; else what Slurm,
    then the resolver, has for the node's name; else the only one there is.

    Raises ConfigError with all interfaces when it can't be told.
    """
    own = _addresses()
    if interface:
        if interface not in own:
            raise ConfigError(f"launch.interface: {node_name()} has no interface {interface!r} with IPv4; {_told(own)}")
        return own[interface][0]
    reachable = {one for name, ones in own.items() if name != "lo" for one in ones if not one.startswith("127.")}
    for name in (_slurm_address(), socket.gethostname()):
        for found in _resolved(name):
            if found in reachable:
                return found
    if len(reachable) == 1:
        return reachable.pop()
    raise ConfigError(
        f"launch.interface: can't tell by which address other nodes reach {node_name()}; {_told(own)}; name one of them"
    )


def interface_of(found: str) -> str:
    """The name of the interface that has this address."""
    return next(name for name, ones in _addresses().items() if found in ones)


def _addresses() -> dict[str, list[str]]:
    """IPv4 addresses of the interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    rows = {
        name: [one.address for one in ones if one.family is socket.AF_INET]
        for name, ones in psutil.net_if_addrs().items()
    }
    return {name: ones for name, ones in rows.items() if ones and name in up}


def _told(own: dict[str, list[str]]) -> str:
    return "it has " + ", ".join(f"{name} ({', '.join(ones)})" for name, ones in sorted(own.items()))


def _resolved(name: str) -> list[str]:
    try:
        return [str(row[4][0]) for row in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        return []


def _slurm_address() -> str:
    """What Slurm's configuration has for this node; "" without Slurm."""
    name = os.environ.get("SLURMD_NODENAME", "")
    if not name or shutil.which("scontrol") is None:
        return ""
    return _scontrol("node", name, "NodeAddr")


def _scontrol(what: str, name: str, field: str) -> str:
    """A field of what scontrol shows of a node or job; "" when it doesn't say."""
    command = ("scontrol", "--oneliner", "show", what, name)
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_TIME_FORMAT"} | {"LC_ALL": "C"}
    try:
        said = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SCONTROL_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s: %s", " ".join(command), error)
        return ""
    return next((word.partition("=")[2] for word in said.split() if word.startswith(f"{field}=")), "")


# ---- listeners ------------------------------------------------------------------------------------------------------


def host_of(config: Config, interface: str = "") -> str:
    """The address that this node's listeners bind to: loopback where all roles are on one machine."""
    return "127.0.0.1" if config.launch.executor == "local" else address(interface or config.launch.interface)


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def listener_of(config: Config, host: str) -> socket.socket:
    """A socket that listens on the highest port of `launch.ports` that nobody has. Raises ConfigError without one."""
    low, high = config.launch.port_range
    for port in range(high, low - 1, -1):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
            made.listen()
        except OSError:
            made.close()
            continue
        return made
    raise ConfigError(f"launch.ports: no free port in {low}-{high}; give a wider range")


def free_ports(config: Config) -> int:
    low, high = config.launch.port_range
    return sum(port_is_free(port) for port in range(low, high + 1))


def ports_needed(config: Config) -> int:
    """Listeners of a local run: scheduler, dashboard, the ranks' meeting place, a worker a host, two a sandbox node."""
    hosts = sum(pool.jobs * pool.hosts for pool in config.rollout)
    return 3 + hosts + 2 * sum(pool.jobs for pool in config.sandbox)
