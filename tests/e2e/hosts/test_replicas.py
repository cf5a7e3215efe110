"""Several replicas behind one address: started, asked, cut off, restarted one by one, ended (G1)."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from clusters import SERVE, assert_nothing_left, phalanx, wait_for
from rig import Host, Rig

REPLICA = ("demo", *SERVE[3:], "--tp", "2")
KEY = "a-key-of-clients"
PATIENCE_S = "120"
TOKENS = 300  # of a stream that is still written when its host is lost
CURL = ("curl", "-sS", "-m", PATIENCE_S, "--cacert", "trusted.pem", "-H", f"Authorization: Bearer {KEY}")


def test_a_host_that_is_lost_takes_only_its_replica_with_it(hosts):
    """Two replicas of two hosts, over HTTPS. A client on a fifth host sees no error, whatever happens to one."""
    desk, base = hosts["desk"], f"https://{hosts['a'].address}:8080"
    flags = ("--backend", "ring", "--replicas", "2", "--ssl", "trusted.pem")
    words = ("up", "4.json", *flags, "--", *REPLICA, "--", "--host", "0.0.0.0", "--api-key", KEY)
    assert f"phalanx is up: {base}/v1 (2 replicas of 2 hosts)" in phalanx(desk, *words).stdout
    text = answer(desk, base)
    assert_keys_are_private(hosts)

    whole = answer(desk, base, TOKENS)
    streams = [stream(desk, base) for _ in range(2)]  # by turns: one at each replica
    begun = [pieces(one, 1) for one in streams]
    hosts["c"].cut()
    assert [text + pieces(one) for text, one in zip(begun, streams, strict=True)] == [whole] * 2
    assert [answer(desk, base) for _ in range(4)] == [text] * 4
    wait_for(lambda: used(desk, base) == {"0"}, "the gateway leaves the replica out")
    status = phalanx(desk, "status", "4.json", check=False)
    assert status.returncode != 0
    (lost,) = (line for line in status.stdout.splitlines() if line.startswith("1:0"))
    assert "unreachable" in lost and "host-unreachable" in lost
    (gateway,) = (line for line in status.stdout.splitlines() if line.startswith("gateway"))
    assert "1 of 2 replicas" in gateway and "replica 1 " in gateway
    hosts["c"].mend()
    wait_for(lambda: used(desk, base) == {"0", "1"}, "the gateway uses it again")

    before = {name: processes(hosts[name]) for name in "abcd"}
    phalanx(desk, "restart", "4.json", "1")
    after = {name: processes(hosts[name]) for name in "abcd"}
    assert (after["a"], after["b"]) == (before["a"], before["b"])
    assert not before["c"] & after["c"] and not before["d"] & after["d"]
    assert used(desk, base) == {"0", "1"} and answer(desk, base) == text
    unknown = phalanx(desk, "restart", "4.json", "7", check=False)
    assert unknown.returncode == 64 and "There are 0, 1." in unknown.stderr

    logs = phalanx(desk, "logs", "4.json", "--lines", "5").stdout
    assert {line.split()[0] for line in logs.splitlines()} == {*"abcd"} and "\na gateway " in logs
    alone = phalanx(desk, "logs", "4.json", "--replica", "1", "--rank", "1", "--lines", "5").stdout
    assert {line.split()[0] for line in alone.splitlines()} == {"d"}
    of_gateway = phalanx(desk, "logs", "4.json", "gateway", "--lines", "3").stdout
    assert len(of_gateway.splitlines()) == 3 and all(line[:10] == "a gateway " for line in of_gateway.splitlines())
    found = json.loads(phalanx(desk, "status", "4.json", "--json").stdout)
    assert {name: list(members) for name, members in found["replicas"].items()} == {"0": ["a", "b"], "1": ["c", "d"]}
    phalanx(desk, "down", "4.json")
    assert_nothing_left(hosts)


def asking(base: str, tokens: int, **more: object) -> list[str]:
    """The command that asks."""
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "What is phalanx?"}], "temperature": 0,
        "max_tokens": tokens, "ignore_eos": True, **more,
    }  # fmt: skip
    return [*CURL, "-N", "--json", json.dumps(body), f"{base}/v1/chat/completions"]


def stream(host: Host, base: str) -> subprocess.Popen[str]:
    """A stream to a client on a host."""
    return host.popen(asking(base, TOKENS, stream=True))


def pieces(one: subprocess.Popen[str], count: int = -1) -> str:
    """The text of the next `count` events with text, or all that is still to come."""
    assert one.stdout is not None
    text = ""
    while count and (line := one.stdout.readline()) and line != "data: [DONE]\n":
        if line.startswith("data: "):
            choices = json.loads(line.removeprefix("data: ")).get("choices")
            assert choices is not None, line
            if piece := choices and choices[0]["delta"].get("content"):
                text += piece
                count -= 1
    return text


def answer(host: Host, base: str, tokens: int = 24) -> str:
    """A whole answer, asked by a client on a host."""
    said: Any = json.loads(host.run(asking(base, tokens)).stdout)
    assert "choices" in said, said
    return str(said["choices"][0]["message"]["content"])


def used(host: Host, base: str) -> set[str]:
    """The replicas that the gateway gives requests to."""
    replicas = json.loads(host.run([*CURL, f"{base}/health"]).stdout)["replicas"]
    return {name for name, said in replicas.items() if said == "ok"}


def processes(host: Host) -> set[int]:
    """What up started on a host, as process ids."""
    verbs = ("serve", "rank", "agent", "gateway", "host supervise")
    return {pid for verb in verbs for pid in host.processes(f"phalanx {verb}")}


def assert_keys_are_private(hosts: Rig) -> None:
    """They are on no command line, and in files of their owner alone; a server refuses clients without its own."""
    key = (hosts["a"].home / ".phalanx/gateway/replicas.toml").read_text().split('key = "')[1].split('"')[0]
    for name in "abcd":
        assert not any(one in args for args in hosts[name].processes("phalanx").values() for one in (key, KEY))
        files = [file for file in (hosts[name].home / ".phalanx").rglob("*") if file.is_file()]
        holding = [file for file in files if any(one in file.read_text() for one in (key, KEY))]
        assert all(file.stat().st_mode & 0o077 == 0 for file in holding)
    models = ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", f"https://{hosts['c'].address}:8000/v1/models"]
    assert hosts["desk"].run(models).stdout == "401"
