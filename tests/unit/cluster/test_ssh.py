"""What a host that was taken over may say to whoever asks it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from phalanx.cluster import ssh
from phalanx.cluster.host_status import HostStatus
from phalanx.cluster.network_setup import facts_of
from phalanx.cluster.ssh import ANSWER, Remote
from phalanx.errors import ClusterError


class Liar(Remote):
    """A host on which a program of its own answers."""

    def __init__(self, script: str, name: str = "liar") -> None:
        super().__init__(name)
        self._script = script

    def command(self, *words: str, agent: bool = False) -> list[str]:
        return [sys.executable, "-c", self._script]


def answering(line: str) -> Liar:
    return Liar(f"print({ANSWER + line!r})")


def test_a_terminal_gets_no_commands():
    said = asyncio.run(
        answering('{"host": "a\\u001b]0;title\\u0007", "last_line": "b\\u202e"}').call("status", {}, HostStatus)
    )
    assert (said.host, said.last_line) == (r"a\x1b]0;title\x07", r"b\u202e")
    with pytest.raises(ClusterError) as failed:
        asyncio.run(Liar("import sys; sys.exit('\\x1b[2J')").call("status", {}, HostStatus))
    assert "\x1b" not in str(failed.value) and r"\x1b[2J" in str(failed.value)


@pytest.mark.parametrize("line", ["", "{", "[" * 100_000, '{"host": 1}', "null"], ids=lambda line: line[:20])
def test_other_answers_are_errors(line):
    with pytest.raises(ClusterError, match="liar answers in another way than this phalanx expects"):
        asyncio.run(answering(line).call("status", {}, HostStatus))


def test_every_host_that_does_not_answer_is_named():
    dead = [Liar(f"import sys; sys.exit('gone: {name}')", name) for name in ("a", "b")]
    with pytest.raises(ClusterError) as failed:
        asyncio.run(facts_of([*dead, Liar("print()", "c")]))
    assert [line.partition(":")[0] for line in failed.value.message.splitlines()] == ["a", "b", "c"]
    assert "gone: a\nb: " in failed.value.message
    assert failed.value.remedy.count("ssh b ") == 1
    with pytest.raises(ClusterError) as alone:
        asyncio.run(facts_of(dead[:1]))
    assert "\n" not in alone.value.message and alone.value.message.endswith("gone: a")


def test_an_answer_without_end_takes_no_memory(monkeypatch):
    monkeypatch.setattr(ssh, "MAX_KEPT", 1000)
    script = "import sys; sys.stdin.read(); [print('x' * 999) for _ in range(9999)]"
    code, out, _ = asyncio.run(ssh.run([sys.executable, "-c", script], b"{}", 60.0, "liar", doing="test"))
    assert (code, len(out)) == (0, 1000)


def test_a_line_without_end_is_an_error(monkeypatch):
    monkeypatch.setattr(ssh, "LINE_LIMIT", 1000)

    async def listen() -> None:
        async for _ in Liar("print('x' * 9999, flush=True); input()").listen("watch", {}, HostStatus):
            pass

    with pytest.raises(ClusterError, match=r"liar: .*a line of more than 1000 bytes"):
        asyncio.run(listen())


@pytest.mark.parametrize("ignores", [False, True])
def test_a_command_is_ended_without_asking_for_its_status(ignores, monkeypatch):
    """The status of one that has just ended would be lost to asyncio's thread, which warns on stderr."""

    def poll(process: subprocess.Popen[bytes]) -> int | None:
        raise AssertionError("asked")

    async def scenario() -> int | None:
        ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores else ""
        script = f"import signal, time; {ignoring}print(); time.sleep(600)"
        process = await ssh._started([sys.executable, "-uc", script])
        assert process.stdout is not None
        await process.stdout.readline()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "poll", poll)
            await ssh.end(process)
        return process.returncode

    assert asyncio.run(scenario()) == -(signal.SIGKILL if ignores else signal.SIGTERM)
