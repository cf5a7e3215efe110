"""Runs phalanx on other hosts through OpenSSH's `ssh`, so that the user's configuration, keys and jump hosts apply.

A call is `phalanx host VERB` on the host, with one JSON object as input and one as output. Every error names the host
and, if `faults` knows it, the cause and the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from phalanx.config import RUN_PHALANX
from phalanx.errors import ClusterError
from phalanx.faults import recognise
from phalanx.text.printable import printable

CONNECT_S = 4  # less than the 5 s within which `status` reports a host that does not answer
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
SSH_FAILED = 255  # ssh's own exit status
ANSWER = "phalanx-answer:"  # before the JSON, since login scripts may print other lines
ERROR = "error: "  # begins what phalanx reports there; the remedy follows
LAST_LINES = 6  # of stderr in a message
INSTALLED_PYTHON = '"$(cd -P "$HOME/.phalanx/venv/bin" 2>/dev/null && pwd)/python"'
"""For sh: the Python of the release that `phalanx install` put in use (`releases.py`). By its own path and not the
link's: what was started goes on with its release when another one comes into use."""
LINE_LIMIT = 1 << 24  # bytes
MOST_SAID = 1 << 26  # bytes that are kept of one answer

T = TypeVar("T")


class Remote:
    """phalanx on one host.

    Args:
        name: the host's name for ssh. For this machine's own names, commands run without ssh.
        python: the host's Python with phalanx; "": the one of `phalanx install`, else the same as here. If it does not
            exist, `phalanx` on the login shell's PATH is used.
    """

    def __init__(self, name: str, *, python: str = "") -> None:
        self.name = name
        self._python = python

    def command(self, *words: str) -> list[str]:
        """The local command that runs `phalanx WORDS` on the host."""
        if is_here(self.name):
            return [sys.executable, *RUN_PHALANX, *words]
        return self.shell_command(_phalanx(self._python, words))

    def shell_command(self, script: str) -> list[str]:
        """The local command that runs a line for sh on the host."""
        if is_here(self.name):
            return ["/bin/sh", "-c", script]
        return [*SSH, "--", self.name, f"exec /bin/sh -c {shlex.quote(script)}"]

    async def call(self, verb: str, request: object, kind: type[T], *, timeout_s: float = 60.0) -> T:
        """Send one request and return its answer.

        Raises:
            ClusterError: ssh or the verb failed, or the answer did not arrive in time; names host, cause and remedy.
        """
        payload = msgspec.json.encode(request)
        code, out, err = await run(self.command("host", verb), payload, timeout_s, self.name)
        answer = next((line for line in reversed(out.splitlines()) if line.startswith(ANSWER)), None)
        if code or answer is None:
            raise failure(self.name, code, f"{err}\n{out}")
        return _decode(self.name, answer, kind)

    async def listen(self, verb: str, request: object, kind: type[T]) -> AsyncGenerator[T, None]:
        """Send one request and yield answers until the generator is closed.

        Raises:
            ClusterError: as `call`; also if the answers end.
        """
        process = await asyncio.create_subprocess_exec(
            *self.command("host", verb),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            async for line in process.stdout:
                if (text := line.decode(errors="replace")).startswith(ANSWER):
                    yield _decode(self.name, text, kind)
            raise failure(self.name, await process.wait(), (await _said(process.stderr)).decode(errors="replace"))
        except ValueError as error:  # of `readline`
            raise failure(self.name, 0, f"a line of more than {LINE_LIMIT} bytes") from error
        finally:
            await end(process)


def is_here(name: str) -> bool:
    """Whether a name is this machine's."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _phalanx(python: str, words: Sequence[str]) -> str:
    arguments = shlex.join(words)
    programs = [shlex.quote(python)] if python else [INSTALLED_PYTHON, shlex.quote(sys.executable)]
    return f"for program in {' '.join(programs)}; do " + (
        f'if [ -x "$program" ]; then exec "$program" {shlex.join(RUN_PHALANX)} {arguments}; fi; done; '
        f'exec "${{SHELL:-/bin/sh}}" -lc {shlex.quote(f"exec phalanx {arguments}")}'
    )


def _decode(name: str, line: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(_safe(msgspec.json.decode(line[len(ANSWER) :])), kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ClusterError(
            f"{name} answers in another way than this phalanx expects: {error}.",
            remedy=f"`phalanx install --upgrade {name}` brings this machine's version to it.",
        ) from error


def _safe(value: Any) -> Any:
    """A decoded answer whose texts may be printed: the host may have been taken over."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_safe(each) for each in value]
    if isinstance(value, dict):
        return {_safe(name): _safe(each) for name, each in value.items()}
    return value


async def run(command: Sequence[str], payload: bytes, timeout_s: float, name: str) -> tuple[int, str, str]:
    """Run a local command that talks to a host. Returns its exit status, stdout and stderr.

    Raises:
        ClusterError: ssh is missing, or did not end in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be run: {error.strerror}.", remedy="Install OpenSSH.") from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err, _ = await asyncio.gather(
                _said(process.stdout), _said(process.stderr), _tell(process.stdin, payload)
            )
            await process.wait()
    except TimeoutError as error:
        raise failure(name, SSH_FAILED, f"ssh gave no answer within {timeout_s:g} s") from error
    finally:
        await end(process)
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


async def _said(stream: asyncio.StreamReader | None) -> bytes:
    """What a host said, `MOST_SAID` bytes at most."""
    said = bytearray()
    while stream is not None and (piece := await stream.read(1 << 16)):
        said += piece[: MOST_SAID - len(said)]
    return bytes(said)


async def _tell(stream: asyncio.StreamWriter | None, payload: bytes) -> None:
    if stream is not None:
        with contextlib.suppress(ConnectionError):  # the host's answer says why
            stream.write(payload)
            await stream.drain()
        stream.close()


async def end(process: asyncio.subprocess.Process) -> None:
    """End a child process: SIGTERM, then SIGKILL after 2 s."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(2.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def failure(name: str, code: int, said: str) -> ClusterError:
    """The error of a failed call, from its exit status and output."""
    lines = [line.strip() for line in printable(said).splitlines() if line.strip() and not line.startswith(ANSWER)]
    for line in lines:
        if (fault := recognise(line)) is not None:
            return ClusterError(f"{name}: {fault.cause} ({fault.name}: {line})", remedy=fault.remedy)
    own = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    if own and code != SSH_FAILED:
        first, *remedy = lines[own[-1] :]
        return ClusterError(f"{name}: {first.removeprefix(ERROR)}", remedy=" ".join(remedy[:LAST_LINES]))
    tail = " / ".join(lines[-LAST_LINES:]) or "it said nothing"
    how = "ssh failed" if code == SSH_FAILED else f"phalanx ended with status {code} there"
    return ClusterError(f"{name}: {how}: {tail}", remedy=f"Try it by hand: ssh {name} phalanx version")


async def on_all(
    hosts: Iterable[Remote], verb: str, request: object, kind: type[T], *, timeout_s: float = 60.0
) -> dict[str, T | ClusterError]:
    """Send the same request to all hosts in parallel. Returns each host's answer or error, by name."""
    remotes = list(hosts)
    calls = (remote.call(verb, request, kind, timeout_s=timeout_s) for remote in remotes)
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: dict[str, T | ClusterError] = {}
    for remote, result in zip(remotes, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, ClusterError):
            raise result
        answers[remote.name] = result
    return answers
