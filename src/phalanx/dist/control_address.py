"""Where the ranks of a start meet: a Unix socket if all run on one machine, else a TCP port of rank 0.

A Unix socket lies in a directory that only this user may enter, so a process that reaches it may join. Over TCP both
ends show certificates (`phalanx.tls`).
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from phalanx.errors import GroupError

BACKLOG = 64  # connections that wait in the kernel until the leader accepts them


def is_unix(control: str) -> bool:
    """Whether a control address is the path of a Unix socket; else it is `host:port`."""
    return control.startswith("/")


def listen(control: str) -> socket.socket:
    """A listening socket for ranks: the leader's, or a stage's for hidden states.

    Raises:
        GroupError: other users may enter the Unix socket's directory, or the address is taken or not this machine's.
    """
    try:
        if is_unix(control):
            with _unix_socket(control) as listener:
                listener.bind(control)
                listener.listen(BACKLOG)
            return listener
        host, port = _host_and_port(control)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise GroupError(
            f"This rank cannot listen on {control} for other ranks: {error.strerror or error}.",
            remedy="The next start takes another address.",
        ) from error


def connect(control: str, timeout_s: float) -> socket.socket:
    """A connection to another rank's listening socket.

    Raises:
        OSError: nothing listens there, or it cannot be reached within `timeout_s` seconds.
        GroupError: other users may enter the directory of a Unix socket.
    """
    if is_unix(control):
        with _unix_socket(control) as connected:
            connected.settimeout(timeout_s)
            connected.connect(control)
        return connected
    connected = socket.create_connection(_host_and_port(control), timeout=timeout_s)
    if connected.getsockname() == connected.getpeername():
        connected.close()  # TCP's simultaneous open: a connection to a free local port may connect to itself
        raise ConnectionRefusedError("nothing listens there")
    return connected


def remove_socket(control: str) -> None:
    """Remove a Unix socket on which nothing listens any more."""
    if is_unix(control):
        Path(control).unlink(missing_ok=True)


@contextmanager
def _unix_socket(control: str) -> Iterator[socket.socket]:
    """A new socket for a path in a private directory; closed if the block fails."""
    _check_private(Path(control).parent)
    with ExitStack() as on_error:
        made = socket.socket(socket.AF_UNIX)
        on_error.callback(made.close)
        yield made
        on_error.pop_all()


def _host_and_port(control: str) -> tuple[str, int]:
    host, _, port = control.rpartition(":")
    return host, int(port)


def _check_private(directory: Path) -> None:
    """Check that no other user may enter the directory, and so connect to a socket in it or replace it."""
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise GroupError(
            f"{directory} holds the socket of a group's ranks, and other users may enter it.",
            remedy=f"It has to belong to the user that starts the ranks: chmod 700 {directory}",
        )
