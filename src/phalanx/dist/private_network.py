"""Runs a command in a network namespace with only loopback. A script, and the function that makes its command line.

For `mpirun` and its ranks on one machine: Open MPI's daemon listens on all addresses, whatever its settings, and obeys
every process that connects. Linux gives a process a network namespace of its own, which no other process can reach;
unprivileged users get one together with a user namespace. Where the system refuses both, the command runs in the
machine's network, and a line on stderr says so. Unix sockets still work. Imports no other part of phalanx, for speed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# Linux's <sched.h>, <sys/ioctl.h> and <net/if.h>:
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
REQUEST = "16sh22x"  # struct ifreq: a name and its flags

REFUSED = (
    "this system allows no private network, so Open MPI's daemon (prterun) listens on all addresses of this machine: "
    "block these ports for other machines and users, or use --backend ring"
)


def in_private_network(command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a private network; `command` itself on systems other than Linux."""
    return [sys.executable, "-I", "-S", __file__, *command] if sys.platform == "linux" else list(command)


def main() -> None:
    """Enter a private network and run the command of `sys.argv`; without one, exit with 0 if entering works."""
    command = sys.argv[1:]
    entered = enter()
    if not command:
        sys.exit(not entered)
    if entered:
        command = ["env", "HF_HUB_OFFLINE=1", *command]  # the server has downloaded the model
    else:
        print(f"phalanx: {REFUSED}", file=sys.stderr, flush=True)
    os.execvp(command[0], command)


def enter() -> bool:
    """Move this process into a new network with loopback; False if the system does not allow it.

    A child tries it first: Ubuntu allows the namespaces, refuses to set them up, and the process cannot go back.
    """
    child = os.fork()
    if child == 0:
        try:
            _leave_network()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        return False
    _leave_network()
    return True


def _leave_network() -> None:
    """Move this process into a new network with loopback.

    Raises:
        OSError: the system does not allow it. This process may be in an unusable network now.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack(REQUEST, b"lo", 0)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(REQUEST, b"lo", flags | IFF_UP))


if __name__ == "__main__":
    main()
