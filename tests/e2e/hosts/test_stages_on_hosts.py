"""Pipeline stages on several hosts (P1, P3): up, a slow link, a stage that is cut off, down; the text is always one."""

from __future__ import annotations

import json

from clusters import SERVE, Stream, ask, cluster, health, phalanx, wait_for

PROMPT = "What is phalanx?"
TOKENS = 120
STAGED = (*SERVE, "--pp", "2")
SLOW = "tc qdisc replace dev eth0 root tbf rate 20mbit burst 64kb latency 50ms"


def test_stages_on_two_and_on_four_hosts(hosts):
    desk = hosts["desk"]
    with cluster(hosts, 2, "auto", serve=STAGED) as url:
        whole = ask(desk, url, PROMPT, TOKENS)
        assert [(rank["stage"], rank["host"]) for rank in health(hosts)["ranks"]] == [(1, "a"), (0, "b")]
        table = phalanx(desk, "status", "2.json").stdout.splitlines()
        assert table[1].split()[1:7] == ["1:", "layers", "4", "to", "7", "a"]
        assert table[2].split()[1:7] == ["0:", "layers", "0", "to", "3", "b"]
        hosts["b"].run(SLOW.split())
        try:
            assert ask(desk, url, PROMPT, TOKENS) == whole
        finally:
            hosts["b"].run("tc qdisc del dev eth0 root".split())
        stream = Stream(desk, url, PROMPT, TOKENS)
        begun = stream.piece()
        assert begun
        hosts["b"].cut()
        wait_for(lambda: "b" in health(hosts).get("reason", ""), "/health names the host")
        hosts["b"].mend()
        assert begun + stream.text() == whole
    with cluster(hosts, 4, "ring", serve=STAGED) as url:
        assert ask(desk, url, PROMPT, TOKENS) == whole
        assert [rank["stage"] for rank in health(hosts)["ranks"]] == [1, 1, 0, 0]


def test_the_slow_link_between_stages_is_named(hosts):
    """Of two, c to b and b to a, in the direction of activations."""
    hosts["c"].run(SLOW.replace("20mbit", "200mbit").split())
    try:
        said = phalanx(hosts["desk"], "net", "test", "3.json", "--pp", "3", "--links-only").stdout
    finally:
        hosts["c"].run("tc qdisc del dev eth0 root".split())
    rows = {tuple(line.split()[:2]): line for line in said.splitlines()}
    assert "stage 0 to 1" in rows["c", "b"] and "stage 1 to 2" in rows["b", "a"] and "stage" not in rows["a", "c"]
    assert "c to b is slow" in said and "b to a is slow" not in said


def test_the_doctor_knows_what_each_stage_needs(hosts):
    """A stage that does not fit is named with its host. (`up` asks for the same, and goes on where it fits.)"""
    flags = ("--model", "demo", "--pp", "2", "--pp-split", "6,2", "--memory-guard-gb", "100000")
    done = phalanx(hosts["desk"], "doctor", "2.json", *flags, "--json", check=False)
    (short,) = (one for one in json.loads(done.stdout)["results"]["between hosts"] if one["level"] == "bad")
    assert "a lacks" in short["seen"] and "b lacks" in short["seen"] and "stage 0 (layers 0 to 5)" in short["seen"]
    assert done.returncode == 20 and "--memory-guard-gb" in short["remedy"]


def test_stages_that_hosts_cannot_form(hosts):
    for words, said in (
        (("--pp", "3"), "4 hosts cannot be divided equally among --pp 3"),
        (("--pp", "2", "--tp", "2,1"), "--tp 2,1 and --pp 2 need 3 hosts, not 4"),
    ):
        done = phalanx(hosts["desk"], "up", "4.json", "--", "demo", *words, check=False)
        assert done.returncode == 64 and said in done.stderr
