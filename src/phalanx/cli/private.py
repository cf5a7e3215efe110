"""A private server: `phalanx serve` as a child process, for commands that need a server for a while.

Its stderr goes to a log file. Its address is read from its stdout, which only the server writes: text of a model's
files in the log could imitate the line and send a conversation and its key elsewhere. The child ends when its stdin
closes, so that it does not outlive a parent that was killed; unless it is meant to stay (`keep`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from phalanx.cli.engine_extra import require_engine
from phalanx.cluster.argument_flags import flag_value
from phalanx.config import RUN_PHALANX
from phalanx.environment import runtime_dir
from phalanx.errors import EngineUnavailable

READY = re.compile(r"^phalanx is ready: (\S+) \(model (.+)\)\n", re.MULTILINE)
POLL_S = 0.05  # between two looks at the log
END_S = 60.0  # after SIGTERM; the server drains within --drain-seconds, 30 by default


class PrivateServer:
    """A `phalanx serve` process. `url` (ending in /v1) and `model` are known once `wait_ready` has returned.

    `certificate` is the server's, if the flags give it one.

    Raises:
        ConfigError: the engine is not installed.
    """

    def __init__(self, model: str, flags: Sequence[str] = (), *, keep: bool = False) -> None:
        require_engine()
        self.url = ""
        self.model = ""
        certificate = flag_value(flags, "--ssl-certfile")
        self.certificate = None if certificate is None else Path(certificate)
        handle, name = tempfile.mkstemp(prefix="phalanx-serve-", suffix=".log", dir=runtime_dir())
        self.log = Path(name)
        self._shown = 0  # characters of the log that went to `show`
        self._stdout = tempfile.TemporaryFile(dir=self.log.parent)  # noqa: SIM115 - read until the server ends
        with os.fdopen(handle, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *RUN_PHALANX, "serve", model, *flags, *([] if keep else ["--stop-on-eof"])],
                stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
                stdout=self._stdout,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the server in order
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait_ready(self, show: Callable[[str], None]) -> None:
        """Wait until the server serves; `show` gets each log line on the way.

        Raises:
            Exit: the server ended with an error, which `show` has shown; the exit code is the server's.
            EngineUnavailable: the server ended without an error, because of a signal.
        """
        while True:
            ended = self._process.poll() is not None
            text = self.log.read_text(errors="replace")
            complete = len(text) if ended else text.rfind("\n") + 1
            for line in text[self._shown : complete].splitlines():
                show(line)
            self._shown = max(self._shown, complete)
            if ready := READY.search(os.pread(self._stdout.fileno(), 1 << 16, 0).decode(errors="replace")):
                self.url, self.model = ready.groups()
                return
            if ended and self._process.returncode > 0:
                raise typer.Exit(self._process.returncode)
            if ended:
                raise EngineUnavailable(
                    f"A signal ended the server (status {self._process.returncode}).", remedy=f"Its log is {self.log}."
                )
            time.sleep(POLL_S)

    def stop(self) -> int:
        """End the server in order and return its exit status. Deletes the log if that is 0."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stdout.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.returncode == 0:
            self.log.unlink(missing_ok=True)
        return self._process.returncode


def free_port(wanted: int) -> int:
    """`wanted` if it can be bound, else 0 (the server picks one)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted
