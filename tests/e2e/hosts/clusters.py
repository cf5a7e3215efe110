"""What the tests here do with clusters: up, down, questions from a third host, and what must be left of it: nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rig import Host, Rig

SERVE = ("demo", "--host", "0.0.0.0", "--kv-cache-gb", "0.2", "--prefix-cache-gb", "0", "--memory-guard-gb", "1",
         "--heartbeat-timeout-seconds", "8")  # fmt: skip
PORT = 8000
WAIT_S = 240.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

CLIENT = """
import json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
stream = client.chat.completions.create(
    model="demo", messages=[{"role": "user", "content": sys.argv[2]}], temperature=0, stream=True,
    max_tokens=int(sys.argv[3]), extra_body={"ignore_eos": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(json.dumps(chunk.choices[0].delta.content), flush=True)
print(json.dumps(None), flush=True)
"""


def phalanx(host: Host, *words: str, check: bool = True, timeout: float = 400.0) -> subprocess.CompletedProcess[str]:
    """The command at a host's keyboard; its output without colours."""
    done = host.run(["phalanx", *words], check=check, timeout=timeout)
    done.stdout, done.stderr = ANSI.sub("", done.stdout), ANSI.sub("", done.stderr)
    return done


def up(rig: Rig, count: int, backend: str, *flags: str, serve: tuple[str, ...] = SERVE) -> str:
    """Start a cluster of the first hosts from the desk; its URL."""
    words = ("up", f"{count}.json", "--backend", backend, "--timeout", str(WAIT_S), *flags, "--", *serve)
    said = phalanx(rig["desk"], *words).stdout
    found = re.search(rf"phalanx is up: (https?://\S+/v1) \({count} hosts?\)", said)
    assert found is not None, said
    return found[1]


@contextmanager
def cluster(rig: Rig, count: int, backend: str, *flags: str, serve: tuple[str, ...] = SERVE) -> Iterator[str]:
    """A running cluster, ended in order; nothing is left of it."""
    url = up(rig, count, backend, *flags, serve=serve)
    yield url
    phalanx(rig["desk"], "down", f"{count}.json")
    assert_nothing_left(rig)


class SharedCluster:
    """A cluster of two hosts on a ring that goes on from test to test: it starts when first asked for, and ends when a
    test wants hosts of its own. Its engine may restart three times in five minutes, a new server counts from none."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.url = ""

    def start(self) -> None:
        if not self.url:
            self.url = up(self.rig, 2, "ring", "--env", "NCCL_DEBUG=WARN")

    def end(self) -> None:
        """In order; nothing is left of it."""
        if self.url:
            self.url = ""
            phalanx(self.rig["desk"], "down", "2.json")
            assert_nothing_left(self.rig)

    @property
    def ready(self) -> bool:
        return health(self.rig).get("status") == "ok"


def assert_nothing_left(rig: Rig) -> None:
    """No process, no port, no file but logs. The far ends of ssh need a moment to see that the near ones are gone."""
    for host in rig.hosts.values():
        wait_for(lambda host=host: host.processes("phalanx") == {}, f"no process on {host.name}")
        assert host.processes("prted") == {}, host.name
        assert host.listening() <= {22}, host.name
        assert state_files(host) == [], host.name
        assert host.run(["sh", "-c", "ls /tmp | grep phalanx"], check=False).stdout == "", host.name


def variables_of(host: Host, word: str) -> list[dict[str, str]]:
    """The variables of the processes of a host whose command lines contain a word."""
    texts = [host.run(["cat", f"/proc/{pid}/environ"]).stdout for pid in host.processes(word)]
    return [dict(one.partition("=")[::2] for one in text.split("\0") if one) for text in texts]


def state_files(host: Host) -> list[str]:
    """Files of phalanx on a host, but for logs."""
    found = (host.home / ".phalanx").rglob("*") if (host.home / ".phalanx").exists() else ()
    return [str(file.relative_to(host.home)) for file in found if file.is_file() and "logs" not in file.parts]


def health(rig: Rig, at: str = "a", from_host: str | None = None) -> dict[str, Any]:
    """What /health says, asked on a host; {} if nobody answers."""
    url = f"http://{rig[at].address}:{PORT}/health"
    done = rig[from_host or at].run(["curl", "-s", "-m", "30", url], check=False)
    return json.loads(done.stdout) if done.stdout.startswith("{") else {}


def wait_for(seen: Callable[[], bool], what: str, seconds: float = WAIT_S) -> float:
    """Wait until something is so; after how many seconds it was."""
    begun = time.monotonic()
    while not seen():
        assert time.monotonic() - begun < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - begun


class Stream:
    """A chat of the `openai` client, run on a host."""

    def __init__(self, host: Host, url: str, prompt: str, tokens: int) -> None:
        self._process = host.popen([sys.executable, "-c", CLIENT, url, prompt, str(tokens)])

    def piece(self) -> str | None:
        """The next piece of text; None at the end.

        Raises:
            AssertionError: the stream broke; with the client's words.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            value: str | None = json.loads(line)
        except ValueError:
            raise AssertionError(line + self._process.stdout.read()) from None
        return value

    def text(self) -> str:
        """All that is still to come."""
        parts = []
        while (piece := self.piece()) is not None:
            parts.append(piece)
        self._process.wait(120)
        return "".join(parts)


def ask(host: Host, url: str, prompt: str = "What is phalanx?", tokens: int = 24) -> str:
    """A whole answer."""
    return Stream(host, url, prompt, tokens).text()
