"""The gateway as a process: replicas that are killed and stopped, signals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from processes import QUICK, SUSPICIOUS, are_up, gateway, states, stub, wait_until

from phalanx.errors import ExitCode

CHAT = "/v1/chat/completions"


def stream(url: str, begun: threading.Event | None = None) -> tuple[str, list[Any]]:
    """The replica that answers, and the events."""
    events = []
    body = {"model": "m", "messages": [], "stream": True}
    with httpx.stream("POST", url + CHAT, json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                if begun is not None:
                    begun.set()
    return response.headers["x-phalanx-replica"], events


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_is_killed_or_stopped_ends_its_streams_with_an_error_and_no_others(how):
    with ExitStack() as stack:
        (victim, url_a), (other, url_b) = (stack.enter_context(stub("60", "0.0", "waits")) for _ in range(2))
        _, url = stack.enter_context(gateway("--worker-urls", f"{url_a},{url_b}", *SUSPICIOUS))
        wait_until(lambda: are_up(url, 2))
        begun = [threading.Event() for _ in range(4)]
        found: list[tuple[str, list[Any]]] = []
        threads = [threading.Thread(target=lambda e=event: found.append(stream(url, e))) for event in begun]
        for thread in threads:
            thread.start()
        for event in begun:
            assert event.wait(60)
        victim.signal(how)
        other.signal(signal.SIGUSR1)
        for thread in threads:
            thread.join(120)
        name = url_a.removeprefix("http://")
        assert sorted(replica == name for replica, _ in found) == [False, False, True, True]
        for replica, events in found:
            assert events[-1] == "[DONE]"
            if replica == name:
                assert name in events[-2]["error"]["message"] and len(events) < 60
            else:
                assert len(events) == 61 and "error" not in events[-2]
        wait_until(lambda: states(url)[url_b.removeprefix("http://")] == "ok")
        assert len(stream(url)[1]) == 61  # served by the other one


def test_signals_read_files_again_and_drain(tmp_path):
    file = tmp_path / "replicas.toml"
    with stub("20", "0.05") as (_, url_a), stub("3", "0.0") as (_, url_b):
        file.write_text(f'[[replica]]\nname = "a"\nurl = "{url_a}"\n')
        with gateway("--replicas", str(file), "--prometheus-port", "0") as (made, url):
            wait_until(lambda: are_up(url, 1))
            assert "(replicas: a)" in made.first and httpx.get(f"{url}/metrics", timeout=60).status_code == 404
            file.write_text(f'[[replica]]\nname = "b"\nurl = "{url_b}"\nweight = 0\n')
            made.signal(signal.SIGHUP)
            wait_until(lambda: "line 4: 'weight' has to be at least 0.01" in made.log)
            assert list(states(url)) == ["a"]
            file.write_text(f'[[replica]]\nname = "b"\nurl = "{url_b}"\n')  # noticed without a signal as well
            wait_until(lambda: states(url) == {"b": "ok"})
            file.write_text(f'[[replica]]\nname = "a"\nurl = "{url_a}"\n')
            made.signal(signal.SIGHUP)
            wait_until(lambda: states(url) == {"a": "ok"})
            begun, found = threading.Event(), []
            thread = threading.Thread(target=lambda: found.append(stream(url, begun)))
            thread.start()
            assert begun.wait(60)
            made.signal(signal.SIGTERM)
            thread.join(120)
            assert len(found[0][1]) == 21
            assert made.process.wait(120) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no replicas"),
        (("--worker-urls", "nonsense"), "'nonsense' is not a name|is not the base URL"),
        (("--worker-urls", "http://a", "--model-aliases", "x"), "not ALIAS=MODEL"),
        (("--worker-urls", "http://a", "--ssl-keyfile", __file__), "--ssl-keyfile without a certificate"),
        (("--worker-urls", "http://a", "--worker-ca", __file__), "--worker-ca"),
    ],
)
def test_wrong_flags_are_named(arguments, said):
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "gateway", *QUICK, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == ExitCode.CONFIG
    assert any(part in ended.stderr for part in said.split("|")), ended.stderr
