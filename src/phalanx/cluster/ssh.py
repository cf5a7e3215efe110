"""Runs phalanx on other hosts through OpenSSH's `ssh`, so that the user's configuration, keys and jump hosts apply.

A call is `phalanx host VERB` on the host, with one JSON object as input and one as output. Every error names host and
command and, if `faults` knows it, the cause and the remedy.

A broken or hostile host cannot flood this machine: output is bounded in bytes and time, and made printable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from phalanx.config import RUN_PHALANX
from phalanx.environment import environment
from phalanx.errors import ClusterError
from phalanx.faults import recognise
from phalanx.text.printable import printable, shortened

CONNECT_S = 4  # less than the 5 s within which `status` reports a host that does not answer
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
    *("-o", "RemoteCommand=none", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes"),
)
"""Settings of the user for sessions by hand (terminal, command, forwarded ports) would break calls."""
NO_AGENT = ("-o", "ForwardAgent=no")  # a host that was taken over could use the keys in the user's agent
SSH_FAILED = 255  # ssh's own exit status
ANSWER = "phalanx-answer:"  # before the JSON, since login scripts may print other lines
ERROR = "error: "  # begins what phalanx reports there; the remedy follows
LAST_LINES = 6  # of stderr in a message
LINE_CHARS = 300  # of each of them
LOOKED_AT = 1 << 15  # characters at the end of each stream in which a failure's cause is looked for
INSTALLED_PYTHON = '"$(cd -P "$HOME/.phalanx/venv/bin" 2>/dev/null && pwd)/python"'
"""For sh: the Python of the release that `phalanx install` put in use (`releases.py`). By its own path and not the
link's: what was started goes on with its release when another one comes into use."""
LINE_LIMIT = 1 << 24  # bytes
MAX_KEPT = 1 << 22  # bytes that are kept of one stream, the last ones: the answer comes last
TEXT_CHARS = 10_000  # of one text in an answer
MAX_NUMBER = 1 << 63
BLOCK_TIMEOUT_S = 60.0  # for a block to be taken, and for the next of several answers
EXIT_S = 5.0  # between the end of the answers and that of ssh

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

    def command(self, *words: str, agent: bool = False) -> list[str]:
        """The local command that runs `phalanx WORDS` on the host.

        Args:
            agent: the host may use the user's ssh agent, if the user's configuration says so.
        """
        if is_here(self.name):
            return [sys.executable, *RUN_PHALANX, *words]
        return self.shell_command(_phalanx(self._python, words), agent=agent)

    def shell_command(self, script: str, *, agent: bool = False) -> list[str]:
        """The local command that runs a line for sh on the host."""
        if is_here(self.name):
            return ["/bin/sh", "-c", script]
        return [*SSH, *(() if agent else NO_AGENT), "--", self.name, f"exec /bin/sh -c {shlex.quote(script)}"]

    async def call(
        self,
        verb: str,
        request: object,
        kind: type[T],
        *,
        timeout_s: float = 60.0,
        whole: bool = False,
        blocks: AsyncIterable[bytes] | None = None,
        doing: str = "",
    ) -> T:
        """Send one request and return its answer.

        Args:
            timeout_s: for the answer, once the request was sent.
            whole: the answer's texts are neither shortened nor put on one line.
            blocks: bytes that follow the request.
            doing: names the call in errors.

        Raises:
            ClusterError: ssh or the verb failed, or the answer did not arrive in time; names host, command, cause and
                remedy.
        """
        doing = doing or f"phalanx host {verb}"
        payload = msgspec.json.encode(request) + (b"" if blocks is None else b"\n")
        code, out, err = await run(
            self.command("host", verb), payload, timeout_s, self.name, blocks=blocks, doing=doing
        )
        answer = _answer_in(out)
        if code or answer is None:
            raise failure(self.name, code, err, out, doing=doing)
        return _decode(self.name, answer, kind, whole=whole)

    async def listen(self, verb: str, request: object, kind: type[T]) -> AsyncGenerator[T, None]:
        """Send one request and yield answers until the generator is closed.

        Raises:
            ClusterError: as `call`; also if the answers end, or none comes for `BLOCK_TIMEOUT_S`.
        """
        doing = f"phalanx host {verb}"
        process = await _started(self.command("host", verb))
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        err = bytearray()
        reader = asyncio.create_task(_collect(process.stderr, err))
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            while (line := await _next_answer(process.stdout)) is not None:
                yield _decode(self.name, line, kind)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await asyncio.gather(process.wait(), reader)
            raise failure(self.name, process.returncode or 0, _text(err), doing=doing)
        except TimeoutError as error:
            raise silent(self.name, BLOCK_TIMEOUT_S, _text(err), doing=doing) from error
        except ValueError as error:  # of `readline`
            raise failure(self.name, 0, f"a line of more than {LINE_LIMIT} bytes", doing=doing) from error
        finally:
            reader.cancel()
            await end(process)


async def _next_answer(stream: asyncio.StreamReader) -> str | None:
    """The next line with an answer; None at the end of the stream.

    Raises:
        TimeoutError: none comes, whatever else the host says.
    """
    async with asyncio.timeout(BLOCK_TIMEOUT_S):
        async for line in stream:
            if (text := line.decode(errors="replace")).startswith(ANSWER):
                return text
    return None


def _answer_in(out: str) -> str | None:
    """The last line with an answer."""
    start = out.rfind(f"\n{ANSWER}") + 1
    return out[start:].partition("\n")[0] if out.startswith(ANSWER, start) else None


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


def _decode(name: str, line: str, kind: type[T], *, whole: bool = False) -> T:
    try:
        return msgspec.convert(_safe(msgspec.json.decode(line[len(ANSWER) :]), whole=whole), kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ClusterError(
            f"{name} answers in another way than this phalanx expects: {printable(str(error))[:TEXT_CHARS]}.",
            remedy=f"`phalanx install --upgrade {name}` brings this machine's version to it.",
        ) from error


def _safe(value: Any, *, whole: bool) -> Any:
    """A decoded answer whose texts may be printed: without control characters, on one line and of limited length."""
    if isinstance(value, str):
        return printable(value if whole else shortened(value, TEXT_CHARS).replace("\n", " "))
    if isinstance(value, int) and abs(value) >= MAX_NUMBER:
        raise msgspec.ValidationError("a number is too large")
    if isinstance(value, list):
        return [_safe(each, whole=whole) for each in value]
    if isinstance(value, dict):
        return {_safe(name, whole=whole): _safe(each, whole=whole) for name, each in value.items()}
    return value


async def run(
    command: Sequence[str],
    payload: bytes,
    timeout_s: float,
    name: str,
    *,
    doing: str,
    blocks: AsyncIterable[bytes] | None = None,
) -> tuple[int, str, str]:
    """Run a local command that talks to a host. Returns its exit status, and the end of its stdout and of its stderr.

    Args:
        timeout_s: for its end, once all input is sent.
        doing: names the command in errors.
        blocks: bytes that follow the payload, each of which must be taken within `BLOCK_TIMEOUT_S`.

    Raises:
        ClusterError: ssh is missing, or did not end in time.
    """
    process = await _started(command)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    out, err = bytearray(), bytearray()
    pipes = ((process.stdout, out), (process.stderr, err))
    readers = [asyncio.create_task(_collect(*pipe)) for pipe in pipes]  # from the start: a full pipe stops ssh
    try:
        limit_s = BLOCK_TIMEOUT_S
        await _tell(process.stdin, payload, blocks)
        limit_s = timeout_s
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*readers, process.wait())
    except TimeoutError as error:
        raise silent(name, limit_s, _text(err), _text(out), doing=doing) from error
    finally:
        for reader in readers:
            reader.cancel()
        await end(process)
    assert process.returncode is not None
    return process.returncode, _text(out), _text(err)


async def _started(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a local command in a session of its own: without a terminal no ssh, nor that to a jump host, asks the user.

    Raises:
        ClusterError: there is no such program.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
            env={**environment(), "SSH_ASKPASS_REQUIRE": "never"},
        )
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be run: {error.strerror}.", remedy="Install OpenSSH.") from error


async def _collect(stream: asyncio.StreamReader, output: bytearray) -> None:
    """Read to the end, and keep the last bytes, twice `MAX_KEPT` at most."""
    while piece := await stream.read(1 << 16):
        output += piece
        if len(output) > 2 * MAX_KEPT:
            del output[:-MAX_KEPT]


def _text(output: bytearray) -> str:
    return output[-MAX_KEPT:].decode(errors="replace")


async def _tell(stream: asyncio.StreamWriter, payload: bytes, blocks: AsyncIterable[bytes] | None) -> None:
    """Write everything, and close the stream.

    Raises:
        TimeoutError: a part was not taken within `BLOCK_TIMEOUT_S`.
    """
    with contextlib.suppress(ConnectionError):  # the host's answer says why
        await _write(stream, payload)
        if blocks is not None:
            async for block in blocks:
                await _write(stream, block)
    stream.close()


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    async with asyncio.timeout(BLOCK_TIMEOUT_S):
        stream.write(data)
        await stream.drain()


async def end(process: asyncio.subprocess.Process) -> None:
    """End a child process: SIGTERM, then SIGKILL after 2 s. Drops input that it has not read.

    `Process.terminate` would also ask for its status, which asyncio's own thread then misses: it warns on stderr.
    """
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.transport.abort()
    if process.returncode is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0 if number == signal.SIGTERM else None):
                    await process.wait()
                return


def failure(name: str, code: int, *output: str, doing: str) -> ClusterError:
    """The error of a failed call, from its exit status and output."""
    lines = _lines(output)
    for line in lines:
        if (fault := recognise(line)) is not None:
            return ClusterError(f"{name}: {fault.cause} ({fault.name}: {line})", remedy=fault.remedy)
    own = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    if own and code != SSH_FAILED:
        first, *remedy = lines[own[-1] :]
        return ClusterError(f"{name}: {first.removeprefix(ERROR)}", remedy=" ".join(remedy[:LAST_LINES]))
    tail = " / ".join(lines[-LAST_LINES:]) or "it said nothing"
    how = f"ssh failed (`{doing}`)" if code == SSH_FAILED else f"`{doing}` ended with status {code} there"
    return ClusterError(f"{name}: {how}: {tail}", remedy=f"Try it by hand: ssh {shlex.quote(name)} phalanx version")


def silent(name: str, limit_s: float, *output: str, doing: str) -> ClusterError:
    """The error of a host that ssh reached, or is still reaching, and that did not answer in time."""
    tail = " / ".join(_lines(output)[-LAST_LINES:]) or "nothing"
    return ClusterError(
        f"{name} gave no answer to `{doing}` within {limit_s:g} s. What it said: {tail}.",
        remedy="A login script may wait for something, or a disk may hang there. "
        f"Try it by hand: ssh {shlex.quote(name)} phalanx version",
    )


def _lines(output: Sequence[str]) -> list[str]:
    """The last lines of each stream, without answers and empty ones, as they may be shown."""
    text = "\n".join(printable(stream[-LOOKED_AT:].replace("\r\n", "\n")) for stream in output)
    return [
        shortened(line.strip(), LINE_CHARS) for line in text.split("\n") if line.strip() and not line.startswith(ANSWER)
    ]


async def on_all(
    hosts: Iterable[Remote], verb: str, request: object, kind: type[T], *, timeout_s: float = 60.0, whole: bool = False
) -> dict[str, T | ClusterError]:
    """Send the same request to all hosts in parallel. Returns each host's answer or error, by name."""
    remotes = list(hosts)
    calls = (remote.call(verb, request, kind, timeout_s=timeout_s, whole=whole) for remote in remotes)
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: dict[str, T | ClusterError] = {}
    for remote, result in zip(remotes, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, ClusterError):
            raise result
        answers[remote.name] = result
    return answers


async def from_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The answers of several hosts to calls that run in parallel. Waits for all of them.

    Raises:
        ClusterError: one or more failed; names each of their hosts.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[T] = []
    failed: list[ClusterError] = []
    for result in results:
        if isinstance(result, ClusterError):
            failed.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append(result)
    if failed:
        remedies = dict.fromkeys(error.remedy for error in failed)
        raise ClusterError("\n".join(error.message for error in failed), remedy=" ".join(remedies))
    return answers
