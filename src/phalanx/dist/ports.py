"""Chooses free TCP ports for the connections of one start."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

PORTS = range(20000, 30000)
"""Below the ports that Linux (32768 and up) and macOS (49152 and up) give to outgoing connections: between the choice
of such a port and a rank's listening on it, the system could give it away. Also below the agents' port."""
LOOPBACK = "127.0.0.1"
TAKEN = (errno.EADDRINUSE, errno.EACCES)  # in use, or reserved


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """`count` different TCP ports of this machine that are free now, chosen at random so that parallel starts differ.

    Raises:
        OSError: the address is not one of this machine's; or `EADDRINUSE`: all ports are taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            probe = socket.socket(family)
            try:
                probe.bind((address, port))
            except OSError as error:
                probe.close()
                if error.errno not in TAKEN:
                    raise
            else:
                stack.enter_context(probe)  # bound until all are found, so that no port is found twice
                found.append(port)
    if len(found) < count:
        taken = f"all ports from {PORTS[0]} to {PORTS[-1]} of {address} are taken"
        raise OSError(errno.EADDRINUSE, f"{taken}: end programs that listen there")
    return found
