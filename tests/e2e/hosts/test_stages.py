"""Pipeline stages on several hosts (P1, P3): up, a slow link, a stage that is cut off, down; the text is always one."""

from __future__ import annotations

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


def test_stages_that_hosts_cannot_form(hosts):
    for words, said in (
        (("--pp", "3"), "4 hosts cannot be divided equally among --pp 3"),
        (("--pp", "2", "--tp", "2,1"), "--tp 2,1 and --pp 2 need 3 hosts, not 4"),
    ):
        done = phalanx(hosts["desk"], "up", "4.json", "--", "demo", *words, check=False)
        assert done.returncode == 64 and said in done.stderr
