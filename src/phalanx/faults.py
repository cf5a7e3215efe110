"""The table of known faults: the cause of a line in a log or from ssh, and its remedy.

The most specific faults come first. `recognise` looks up lines of ranks' logs and errors of ssh. `python -m
phalanx.faults` writes `docs/errors.md` from the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct


class Fault(Struct, frozen=True, kw_only=True):
    """One known fault of a machine, a network or a program."""

    name: str
    pattern: str  # regular expression, searched in a line, case ignored
    example: str  # such a line
    cause: str
    remedy: str


FAULTS: tuple[Fault, ...] = (
    # Links between stages: before faults whose words their reasons may have -------------------------------------------
    Fault(
        name="stage-link",
        pattern=r"rank \d+ on \S+ to rank \d+ on \S+: (the frame|a frame's header|frames of another|the connection)",
        example="rank 0: FrameLost: rank 1 on b to rank 0 on a: the connection broke: Connection reset by peer.",
        cause="A connection between two stages broke, was late, or delivered bytes that were not sent.",
        remedy="Nothing wrong was answered. Run `phalanx net test`; replace the cable it names, or look at the log of "
        "the sending rank (`phalanx logs --rank N`).",
    ),
    # RDMA over Thunderbolt ------------------------------------------------------------------------------------------
    Fault(
        name="rdma-bridge-up",
        pattern=r"queue pair to RTR failed with errno 22\b",
        example="[jaccl] Changing queue pair to RTR failed with errno 22",
        cause="bridge0 is up, or still has Thunderbolt interfaces as members, so that the RDMA port has no address.",
        remedy="Run `phalanx net setup` for both hosts of the cable; `phalanx doctor` shows the bridge's members.",
    ),
    Fault(
        name="rdma-bridge-member",
        pattern=r"queue pair to RTR failed with errno 60\b",
        example="[jaccl] Changing queue pair to RTR failed with errno 60",
        cause="The interface of this RDMA device is a member of a bridge on one of the two ends.",
        remedy="Run `phalanx net setup` for the host; it takes the interface out of bridge0.",
    ),
    Fault(
        name="rdma-gid-table",
        pattern=r"queue pair to RTR failed with errno 96\b",
        example="[jaccl] Changing queue pair to RTR failed with errno 96",
        cause="The port's table of addresses (GIDs) is invalid, as after taking an interface down and up.",
        remedy="Reboot this host, then run `phalanx net setup` once. Do not take the interface down and up.",
    ),
    Fault(
        name="rdma-queue-pairs",
        pattern=r"Creating the queue pair failed with errno 16\b",
        example="[jaccl] Creating the queue pair failed with errno 16.",
        cause="The device has no queue pairs left (about ten): other processes hold them, or one was just killed.",
        remedy="Run `phalanx down`, wait 30 seconds, and start again; `phalanx doctor` names left-over processes.",
    ),
    Fault(
        name="rdma-no-memory",
        pattern=r"(jaccl|rdma|ibv|verbs|memory region).*(error -12|errno 12)\b|\berror -12\b",
        example="[jaccl] Recv failed with error -12",
        cause="The RDMA device ran out of resources (ENOMEM): too many small operations, or memory pressure.",
        remedy="Free memory on this host (see `phalanx doctor`, wired memory); if it comes again, reboot it.",
    ),
    Fault(
        name="rdma-busy",
        pattern=r"\bEBUSY\b|\bResource busy\b|(jaccl|rdma|ibv).*errno 16\b",
        example="[jaccl] Could not open device rdma_en5: Resource busy",
        cause="The RDMA device is still busy with a process that was killed.",
        remedy="Wait 30 seconds and start again; `phalanx up` does so by itself after a kill of its own.",
    ),
    Fault(
        name="rdma-ports-down",
        pattern=r"Couldn't allocate protection domain",
        example="[jaccl] Couldn't allocate protection domain",
        cause="The RDMA ports are down, the cable has fallen back to USB, or the device matrix names a missing device.",
        remedy="Re-seat the Thunderbolt cable; `phalanx doctor` shows each port and which cable is at fault. "
        "`--backend ring` works without RDMA.",
    ),
    Fault(
        name="rdma-device-file",
        pattern=r"The device file should start with an array",
        example="[jaccl] The device file should start with an array",
        cause="The file that MLX_IBV_DEVICES names is not an N x N JSON array.",
        remedy="Run `phalanx net setup`, which writes it, or `phalanx hostfile --check FILE`.",
    ),
    Fault(
        name="coordinator-port",
        pattern=r"Recv failed with errno=2\b",
        example="[jaccl] Recv failed with errno=2",
        cause="Something else is connected to the coordinator's port (32323): an old rank, or a probe of the port.",
        remedy="Run `phalanx down --force`, and let nothing connect to that port to see whether it is free.",
    ),
    Fault(
        name="jaccl-missing",
        pattern=r"Cannot initialize jaccl distributed backend",
        example="[distributed] Cannot initialize jaccl distributed backend.",
        cause="This machine's MLX has no RDMA: it needs macOS 26.2 and `rdma_ctl enable`, set in recovery mode.",
        remedy="Use `--backend ring`, or enable RDMA: boot into recovery mode, open Terminal, run `rdma_ctl enable`.",
    ),
    # MLX and its launchers ------------------------------------------------------------------------------------------
    Fault(
        name="ring-peer-lost",
        pattern=r"\[ring\] connection to a peer was lost",
        example="RuntimeError: [ring] connection to a peer was lost",
        cause="The rank before or after this one in the ring has ended, or its host cannot be reached any more.",
        remedy="Look at that rank's log (`phalanx logs --rank N`): it ended first, and says why.",
    ),
    Fault(
        name="double-init",
        pattern=r"distributed.*(already initiali[sz]ed|initiali[sz]ed twice)",
        example="RuntimeError: [distributed] already initialized",
        cause="`mx.distributed.init` was called twice with different backends in one process.",
        remedy="Start ranks with `phalanx up`, or leave the call out of your own script.",
    ),
    Fault(
        name="mlx-launch-missing",
        pattern=r"mlx\.launch: (command )?not found|(not found:|No such file.*) mlx\.launch",
        example="zsh: command not found: mlx.launch",
        cause="mlx.launch is not on the PATH of a non-interactive ssh session.",
        remedy="Use `phalanx up`, which does not need it, or name it with its full path.",
    ),
    Fault(
        name="mpi-daemon",
        pattern=r"(PRTE|ORTE).*(unable to|lost communication)|daemon.*(died unexpectedly|failed to report back)",
        example="PRTE has lost communication with a remote daemon.",
        cause="mpirun could not start, or lost, its daemon on a host.",
        remedy="`phalanx status` names the host; `phalanx doctor` says what is wrong with it.",
    ),
    Fault(
        name="mpi-missing",
        pattern=r"no mpirun and libmpi were found|mpirun: (command )?not found|error while loading.*libmpi",
        example="--backend mpi: no mpirun and libmpi were found.",
        cause="Open MPI is not installed on this host.",
        remedy="Install `phalanx[mpi]` on every host, or use `--backend ring`.",
    ),
    Fault(
        name="gpu-timeout",
        pattern=r"kIOGPUCommandBufferCallbackErrorTimeout|Caused GPU Timeout",
        example="[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:"
        "kIOGPUCommandBufferCallbackErrorTimeout)",
        cause="macOS ended a GPU command that took more than about 5 seconds; waiting for another rank counts.",
        remedy="Look for the rank that was late (`phalanx status`); in prefill, lower --max-num-batched-tokens.",
    ),
    Fault(
        name="gpu-memory",
        pattern=r"kIOGPUCommandBufferCallbackErrorOutOfMemory|\[metal::malloc\].*(exceed|greater)|std::bad_alloc",
        example="[METAL] Command buffer execution failed: Insufficient Memory (00000008:"
        "kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        cause="The GPU's memory is exhausted: on a Mac, the part of the memory that macOS lets the GPU use.",
        remedy="Lower --kv-cache-gb or --max-num-seqs, use more hosts, or a smaller model; `phalanx doctor --all` "
        "shows the part, and how to raise it.",
    ),
    Fault(
        name="gpu-panic",
        pattern=r"prepare count underflow|IOGPUMemory\.cpp",
        example='panic(cpu 9 caller 0xfffffe003d0f8f30): "completeMemory() prepare count underflow" '
        "@IOGPUMemory.cpp:550",
        cause="The Mac has restarted by itself: a fault of macOS's GPU driver, which wired memory brings about on some "
        "machines.",
        remedy="Serve with --no-wired-limit; weights may then be paged out, and steps be slow, where memory is short.",
    ),
    # Memory ---------------------------------------------------------------------------------------------------------
    Fault(
        name="memory-guard",
        pattern=r"MemoryShortage|the memory guard keeps .* free",
        example="rank 1: MemoryShortage: big does not fit: b lacks 12.00 GiB.",
        cause="The model's shard and its caches do not fit beside what this host must keep free. On a GPU its own "
        "memory counts, on a Mac the part that macOS lets the GPU use.",
        remedy="Use more hosts or a smaller model; `phalanx doctor --model M` shows needed and available memory.",
    ),
    Fault(
        name="out-of-memory",
        pattern=r"exit(ed)? (with )?(code|status) 255 while loading|was ended by SIGKILL|signal 9 \(Killed\)"
        r"|out of memory: kill(ed)? process",
        example="rank 1 was ended by SIGKILL (out of memory, or killed by hand)",
        cause="The operating system ended the process: out of memory, or it was killed by hand.",
        remedy="Check memory with `phalanx doctor`; after several kills, wired memory may have leaked: reboot.",
    ),
    Fault(
        name="no-space",
        pattern=r"No space left on device|Disk quota exceeded",
        example="OSError: [Errno 28] No space left on device",
        cause="A disk is full.",
        remedy="Free space on this host: old models (`~/.cache/huggingface`), old logs (`~/.phalanx/logs`).",
    ),
    Fault(
        name="open-files",
        pattern=r"Too many open files",
        example="OSError: [Errno 24] Too many open files",
        cause="The limit on open files is reached. phalanx raises it by itself as far as the hard limit allows.",
        remedy="Raise the hard limit (`ulimit -Hn` shows it; LimitNOFILE in the unit) and restart.",
    ),
    # Hosts, ssh -----------------------------------------------------------------------------------------------------
    Fault(
        name="ssh-host-key-changed",
        pattern=r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        example="@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @",
        cause="The host's key is not the one this machine knows: it was installed anew, or another host answers.",
        remedy="If that is expected: `ssh-keygen -R HOST`, then `ssh HOST` once to accept the new key.",
    ),
    Fault(
        name="ssh-host-key-unknown",
        pattern=r"Host key verification failed",
        example="Host key verification failed.",
        cause="This machine has never connected to the host by ssh, so its key is unknown.",
        remedy="Run `ssh HOST` once and accept the key (or add it to ~/.ssh/known_hosts).",
    ),
    Fault(
        name="ssh-jump",
        pattern=r"stdio forwarding failed|Connection closed by UNKNOWN port",
        example="stdio forwarding failed",
        cause="The jump host (ProxyJump) was reached, but not the host behind it.",
        remedy="Try `ssh -v HOST`; check ProxyJump in ~/.ssh/config and the host's address as the jump host sees it.",
    ),
    Fault(
        name="ssh-key-refused",
        pattern=r"Permission denied \((publickey|.*keyboard)|Too many authentication failures",
        example="Permission denied (publickey).",
        cause="The host does not accept this machine's ssh key.",
        remedy="Run `ssh-copy-id HOST`, or name the key in ~/.ssh/config (IdentityFile).",
    ),
    Fault(
        name="ssh-name-unknown",
        pattern=r"Could not resolve hostname|Name or service not known|nodename nor servname",
        example="ssh: Could not resolve hostname studio3: Name or service not known",
        cause="This host's name cannot be resolved to an address.",
        remedy="Correct the hostfile, or give the host a HostName in ~/.ssh/config.",
    ),
    Fault(
        name="local-network-privacy",
        pattern=r"python.*No route to host|\[Errno 65\] No route to host",
        example="OSError: [Errno 65] No route to host",
        cause="macOS keeps this Python from the local network (a privacy setting; ad-hoc signed ones are affected).",
        remedy="System Settings > Privacy & Security > Local Network: allow it for the terminal and for Python, or use "
        "a signed Python.",
    ),
    Fault(
        name="ssh-refused",
        pattern=r"ssh: connect to host .*Connection refused|kex_exchange_identification",
        example="ssh: connect to host b port 22: Connection refused",
        cause="The host is on, but no ssh server answers.",
        remedy="macOS: System Settings > General > Sharing > Remote Login. Linux: `systemctl enable --now ssh`.",
    ),
    Fault(
        name="host-unreachable",
        pattern=r"ssh: connect to host .*(timed out|No route to host|unreachable|Host is down)"
        r"|Connection (to \S+ (port \d+ )?)?timed out|Timeout, server \S+ not responding",
        example="ssh: connect to host b port 22: Connection timed out",
        cause="The host is off, asleep, or its network cable is out.",
        remedy="Switch it on and check its cable; keep it awake (macOS: `sudo pmset -a sleep 0`).",
    ),
    Fault(
        name="phalanx-missing",
        pattern=r"No module named '?phalanx|phalanx: (command )?not found|command not found: phalanx",
        example="bash: line 1: phalanx: command not found",
        cause="phalanx is not installed for the Python that ssh finds on this host.",
        remedy="Run `phalanx install HOST`, or name its Python with --python.",
    ),
    Fault(
        name="engine-missing",
        pattern=r"No module named '?mlx",
        example="ModuleNotFoundError: No module named 'mlx'",
        cause="phalanx is installed without its engine on this host.",
        remedy="Run `phalanx install HOST`, or install one of `phalanx[cpu]`, `phalanx[cuda13]`, `phalanx[cuda12]` "
        "there; on a Mac `phalanx[engine]`.",
    ),
    # The group ------------------------------------------------------------------------------------------------------
    Fault(
        name="agent-unreachable",
        pattern=r"The agent of \S+ at .* cannot be used",
        example="The agent of b at 10.0.0.2 port 32330 cannot be used: no answer.",
        cause="The first host cannot reach another one: it is off, its cable is out, or its agent has ended.",
        remedy="Switch the host on or mend its link: serving goes on by itself. If it was rebooted, `phalanx restart`.",
    ),
    Fault(
        name="port-taken",
        pattern=r"Cannot listen on .*in use|cannot listen on .*in use|Address already in use|Couldn't bind socket",
        example="Cannot listen on 0.0.0.0 port 8000: Address already in use.",
        cause="Another process has the port.",
        remedy="Run `phalanx down` if it is an old server of yours, else choose another port.",
    ),
    Fault(
        name="versions-differ",
        pattern=r"has (version|mlx|mlx_lm|fingerprint) \S+; the leader, .*, has|PeerRefused",
        example="rank 1 (b, pid 7) has mlx 0.32.3; the leader, rank 0 (a, pid 5), has 0.32.4.",
        cause="The hosts have different versions of phalanx, MLX or mlx-lm, or different model files.",
        remedy="`phalanx install --upgrade HOSTS` makes the versions the same, `phalanx model push` the model.",
    ),
    Fault(
        name="rank-did-not-join",
        pattern=r"could not join the group|PeerMissing",
        example="rank 1 could not join the group at 10.0.0.2:40001 within 60 s",
        cause="A rank is missing: it ended early, a firewall is in its way, or `ips` in the hostfile are wrong.",
        remedy="Look at its log (`phalanx logs --rank N`), open the firewall between the hosts, check `ips`.",
    ),
    Fault(
        name="rank-silent",
        pattern=r"has given no sign of life for",
        example="rank 1 (b, pid 7) has given no sign of life for 2.1 s",
        cause="A host has fallen off the network, sleeps, or is stopped.",
        remedy="Check that host's cable and power; serving goes on by itself when it is back.",
    ),
    Fault(
        name="slow-host",
        pattern=r"is inside step \d+ for|stands (at|before) .* while the others are in step",
        example="rank 1 (b, pid 7) stands at step 4 (which it has left) while the others are in step 5 (limit 10 s)",
        cause="A rank did not finish a step in time: its host is overloaded, swaps, or its GPU hangs.",
        remedy="Check the host's load and memory (`phalanx doctor`); raise --step-timeout-seconds if it is slow.",
    ),
    Fault(
        name="wrong-sums",
        pattern=r"CollectiveFault|the all-reduce is wrong at",
        example="rank 0: CollectiveFault: step 12: the all-reduce is wrong at layers.3.mlp (checksum or tag) on rank 1",
        cause="An all-reduce delivered data that no rank sent: a bad cable, a driver's fault, or another job's ranks.",
        remedy="Nothing wrong was answered. Run `phalanx net test`; replace the cable it names, or use --backend ring.",
    ),
    Fault(
        name="link-loses",
        pattern=r"of [\d,]+ TCP segments were sent again",
        example="rank 0 on a, rank 1 on b: 40 of 2,000 TCP segments were sent again.",
        cause="The connection between these two hosts loses packets: a bad cable, port or switch, or Wi-Fi.",
        remedy="Run `phalanx net test`; replace the cable, or move it to another port. Do not use Wi-Fi.",
    ),
    Fault(
        name="link-slow",
        pattern=r"took [\d.]+ ms for a round trip( at best|.*it should be wired)",
        example="rank 0 on a, rank 1 on b: took 5.2 ms for a round trip at best.",
        cause="The connection between these two hosts is slow: Wi-Fi, a VPN, or a route through a router.",
        remedy="Run `phalanx net test`; give `ips` of a wired network in the hostfile.",
    ),
    Fault(
        name="model-missing",
        pattern=r"ModelNotFound|is neither a (local )?directory nor",
        example="ModelNotFound: models/big is neither a directory nor a hub id that could be fetched.",
        cause="The model is not on this host.",
        remedy="Copy it there: `phalanx model push MODEL --hosts ...`.",
    ),
    Fault(
        name="program-error",
        pattern=r"crashed: (?!RuntimeError|OSError|Connection|BrokenPipe|Timeout|MemoryError)\w+: ",  # no lost peers
        example="rank 1 (b, pid 7) crashed: IndexError: list index out of range",
        cause="An error in phalanx or in the model's own code, on the rank that is named.",
        remedy="The ranks start again by themselves. Report it with the traceback in that rank's log (`phalanx logs`).",
    ),
)
"""The first fault whose pattern occurs in a line is that line's fault."""

LINE_CHARS = 1000  # of a line that are searched: the time grows with their square, and a host may say anything
_COMPILED = tuple((re.compile(fault.pattern, re.IGNORECASE), fault) for fault in FAULTS)


def recognise(line: str) -> Fault | None:
    """The known fault that a line reports; None if there is none."""
    start = line[:LINE_CHARS]
    return next((fault for pattern, fault in _COMPILED if pattern.search(start)), None)


def first_fault(lines: Iterable[str]) -> tuple[str, Fault] | None:
    """The first line that reports a known fault, and the fault."""
    return next(((line, fault) for line in lines if (fault := recognise(line)) is not None), None)


def by_name(name: str) -> Fault:
    """The fault with this name.

    Raises:
        KeyError: there is none.
    """
    return {fault.name: fault for fault in FAULTS}[name]


def markdown() -> str:
    """The text of `docs/errors.md`."""
    parts = [
        "# Known faults\n\nWritten from the table in `src/phalanx/faults.py` by `python -m phalanx.faults`. "
        "`phalanx up`, `status`, `logs`\nand `doctor` name these when a log line or an error of ssh tells of one.\n"
    ]
    for fault in FAULTS:
        parts.append(
            f"## {fault.name}\n\n    {fault.example}\n\n**Cause.** {fault.cause}\n\n**Remedy.** {fault.remedy}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
