"""A host that is broken or was taken over may say anything: no command hangs, fails without words, writes to the
terminal what the host wants, or uses a claim that cannot be true."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from phalanx.cli import down as down_command
from phalanx.cli import logs as logs_command
from phalanx.cli.clusters import status_table
from phalanx.cluster import distribution, host_verbs, ssh
from phalanx.cluster.check_results import Examination, HostFacts
from phalanx.cluster.diagnosis import compare
from phalanx.cluster.discovery import discover
from phalanx.cluster.distribution import prepare, pull, push
from phalanx.cluster.host_status import HostReport, HostStatus, ServerHealth
from phalanx.cluster.host_verbs import GroupTest, LogLines, LogRequest, StartedHere
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.lifecycle import restart_all, stop_all
from phalanx.cluster.machine import Interface
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.shape import shape_of
from phalanx.cluster.ssh import ANSWER, LINE_CHARS, TEXT_CHARS, Remote, failure
from phalanx.cluster.supervisor import LogPlace, RunDirectory, Stopped
from phalanx.dist.topology import LayerCost, Parts
from phalanx.errors import ClusterError, ConfigError
from phalanx.faults import recognise

FACTS_OF_B = {"host": "b", "system": "Linux", "clock": 0.0, "versions": {}}
PREAMBLE = f"""
import json, sys, time
verb, asked = sys.argv[1], sys.stdin.buffer
def answer(value):
    print({ANSWER!r} + json.dumps(value), flush=True)
"""
HAS_NOTHING = (
    "{'directory': 'd', 'missing': [{'path': name, 'have': 0} for name in ('config.json', 'w')], 'free': 1 << 40}"
)


class Hostile(Remote):
    """A host on which this program answers instead of phalanx; `verb` is what it was asked for."""

    def __init__(self, script: str, name: str = "b") -> None:
        super().__init__(name)
        self._script = script

    def command(self, *words: str, agent: bool = False) -> list[str]:
        return [sys.executable, "-c", PREAMBLE + self._script, words[-1]]


def problem(asked: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(ClusterError) as failed:
        asyncio.run(asked)
    return str(failed.value)


async def first(remote: Remote, verb: str = "watch") -> HostReport:
    return await anext(remote.listen(verb, {}, HostReport))


# What it says, and when -------------------------------------------------------------------------------------------


def test_the_cause_is_looked_for_in_the_begin_of_a_line():
    """The time that a pattern takes may grow with the square of a line's length."""
    assert recognise("OSError: Too many open files") is not None
    assert recognise("x" * 5000 + " Too many open files") is None


def test_a_message_is_short_whatever_was_said():
    lines = problem(Hostile("print('y' * (1 << 20)); sys.exit('x' * (1 << 20))").call("status", {}, HostReport))
    assert lines.startswith("b: `phalanx host status` ended with status 1 there: xxx") and len(lines) < 3 * LINE_CHARS


def test_only_the_end_of_what_was_said_is_looked_at():
    said = "Too many open files\n" + "x\n" * ssh.LOOKED_AT
    assert "open files" not in failure("b", 1, said, doing="phalanx host status").message


def test_an_answer_after_a_long_banner_is_found(monkeypatch):
    monkeypatch.setattr(ssh, "MAX_KEPT", 1000)
    script = "print('motd\\n' * 99_999, end=''); answer({'status': {'host': 'me'}}); sys.stdin.read()"
    assert asyncio.run(Hostile(script).call("status", {}, HostReport)).status.host == "me"


def test_texts_have_a_limited_length_but_for_what_is_sent_back():
    spec = {"role": "agent", "command": ["x" * (2 * TEXT_CHARS)], "variables": {}, "log": "l"}
    host = Hostile(f"answer({{'specs': [{spec!r}]}})")
    (short,) = asyncio.run(host.call("spec", {}, StartedHere)).specs
    (whole,) = asyncio.run(host.call("spec", {}, StartedHere, whole=True)).specs
    assert short.command == ["x" * TEXT_CHARS + "... (20000 characters)"] and whole.command == spec["command"]


@pytest.mark.parametrize("number", ["10 ** 400", "-10 ** 400", "1 << 63"])
def test_a_number_that_nothing_has_is_refused(number):
    said = problem(Hostile(f"answer({{'status': {{'host': 'b', 'rss': {number}}}}})").call("status", {}, HostReport))
    assert "b answers in another way than this phalanx expects: a number is too large" in said


@pytest.mark.parametrize("script", ["time.sleep(99)", "[print('motd', flush=True) for _ in iter(int, 1)]"])
def test_a_host_that_never_answers_is_named_with_the_command(script, monkeypatch):
    monkeypatch.setattr(ssh, "BLOCK_TIMEOUT_S", 0.5)
    assert problem(first(Hostile(script))).startswith("b gave no answer to `phalanx host watch` within 0.5 s.")


def test_a_host_that_stops_between_two_answers_is_named(monkeypatch):
    monkeypatch.setattr(ssh, "BLOCK_TIMEOUT_S", 2.0)

    async def twice() -> None:
        async for _ in Hostile("answer({'status': {'host': 'b'}}); time.sleep(99)").listen("watch", {}, HostReport):
            pass

    assert "b gave no answer to `phalanx host watch`" in problem(twice())


def test_a_host_that_closes_its_output_and_goes_on_is_named(monkeypatch):
    monkeypatch.setattr(ssh, "EXIT_S", 0.5)
    script = "import os; sys.stderr.write('it goes on\\n'); os.close(1)\nwhile True: sys.stderr.write('it goes on\\n')"
    assert "b: `phalanx host watch` ended with status 0 there: it goes on" in problem(first(Hostile(script)))


def test_a_log_that_is_followed_gives_a_sign_of_life(tmp_path, monkeypatch):
    """So a host that stops is told from a log to which nothing is added."""
    said: list[object] = []
    (tmp_path / "x.log").write_text("one\n")
    run_dir = RunDirectory(tmp_path)
    run_dir.run.mkdir(parents=True)
    place = LogPlace(role="agent", log=str(tmp_path / "x.log"))
    run_dir.last_log.parent.mkdir()
    run_dir.last_log.write_bytes(msgspec.json.encode(place))
    here, there = os.pipe()
    os.write(there, msgspec.json.encode(LogRequest(lines=9, follow=True)) + b"\n")

    def answer(value: object) -> None:
        said.append(value)
        if len(said) == 4:
            os.close(there)

    monkeypatch.setattr(host_verbs, "WATCH_S", 0.01)
    monkeypatch.setattr(host_verbs, "answer", answer)
    monkeypatch.setattr(sys, "stdin", os.fdopen(os.dup(here)))
    number = os.dup(0)
    os.dup2(here, 0)
    try:
        assert host_verbs.run_verb("logs", run_dir) == 0
    finally:
        os.dup2(number, 0)
    assert said[:4] == [LogLines(lines=["one"]), *[LogLines(lines=[])] * 3]


def test_no_ssh_has_a_terminal_to_ask_at():
    """Nor has the one that ssh starts to reach a jump host, and which knows nothing of BatchMode."""
    script = "import os; print(os.getsid(0) == os.getpid(), os.environ['SSH_ASKPASS_REQUIRE'])"
    assert asyncio.run(ssh.run([sys.executable, "-c", script], b"", 60.0, "b", doing="test"))[1] == "True never\n"


def test_only_a_pull_may_use_the_agent_of_the_user():
    assert "ForwardAgent=no" in Remote("b").command("host", "status")
    assert "ForwardAgent=no" not in Remote("b").command("model", "push", agent=True)


# What it claims ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "field"),
    [
        ({"interfaces": [{"name": "e", "address": "fe80::1%$(touch x)", "prefix": 30}]}, "interfaces"),
        ({"interfaces": [{"name": "e", "address": "x", "prefix": 24}]}, "interfaces"),
        ({"interfaces": [{"name": "e", "address": "10.0.0.1", "prefix": 99}]}, "prefix"),
        ({"gpus": -1}, "gpus"),
        ({"gpus": 1 << 40}, "gpus"),
    ],
)
def test_facts_that_cannot_be_are_refused(claim, field):
    script = f"answer({{'facts': {FACTS_OF_B | claim!r}, 'results': []}})"
    said = problem(Hostile(script).call("facts", {}, Examination))
    assert said.startswith("b answers in another way than this phalanx expects") and field in said


def test_more_results_than_there_are_checks_are_refused():
    script = f"answer({{'facts': {FACTS_OF_B!r}, 'results': [{{'check': 'c', 'level': 'bad', 'seen': 's'}}] * 9999}})"
    assert "results" in problem(Hostile(script).call("check", {}, Examination))


def test_two_hosts_with_one_address_are_named():
    facts = HostFacts(
        host="x", system="Linux", clock=0.0, versions={},
        interfaces=[Interface(name="eth0", address="10.0.0.1", prefix=24)],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"a and b both say that 10.0.0.1 is their address"):
        discover({"a": facts, "b": facts})


def test_a_model_of_more_layers_than_any_has_is_not_shared_out():
    """Sharing out that many would take days."""
    parts = Parts(embedding=LayerCost(1), layers=(LayerCost(1),) * 10_000, head=LayerCost(1))
    facts = HostFacts(host="x", system="Linux", clock=0.0, versions={}, room=1, parts=parts)
    group = Hostfile(hosts=(Host(ssh="a"), Host(ssh="b")))
    results = list(compare({"a": facts, "b": facts}, [group], "ring", shape_of(["--pp", "2"])))
    assert [result.seen for result in results if result.check == "stages"] == ["a says that the model has 10000 layers"]


def shown(layout: ReplicaLayout | None, ranks: list[dict[str, Any]]) -> str:
    status = HostStatus(
        host="b", role="server", child=1, supervisor=1, health=ServerHealth(ok=True, phase="x", ranks=ranks)
    )
    out = Console(file=io.StringIO(), width=200, force_terminal=True)
    out.print(status_table({"b": status}, layout))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("name", ["[/red]", "[link=http://x]y[/link]"])
def test_a_replica_may_have_any_name(name):
    """And does not become a link of the terminal, nor a fault of the table."""
    text = shown(ReplicaLayout(replicas={name: ("b",)}, gateway="b"), [])
    assert "\x1b]8" not in text and name in Console(width=200).render_str(text, markup=False).plain.replace("\x1b", "")


@pytest.mark.parametrize(
    "rank", [{"layers": 7}, {"rank": 0, "layers": [1, 2], "stage": "[link=http://x]y[/link]"}, {"layers": [1]}]
)
def test_ranks_of_another_form_are_left_out(rank):
    assert "layers" not in shown(None, [rank]) and "\x1b]8" not in shown(None, [rank])


def test_ranks_of_stages_are_shown():
    assert "1: layers 4 to 7" in shown(None, [{"rank": 0, "stage": 1, "layers": [4, 7], "pid": 9}])


def test_a_group_test_of_another_form_is_refused():
    info = {"self_test": {"summed": "[/]"}}
    script = f"answer({{'info': {info!r}, 'ranks': [{{'rank': '[link=http://x]y'}}]}})"
    assert "b answers in another way" in problem(Hostile(script).call("group-test", {}, GroupTest))


def test_a_layout_without_the_host_that_tells_it_is_an_error():
    spec = {
        "role": "server", "command": ["serve"], "variables": {}, "log": "l",
        "layout": {"replicas": {"0": []}, "gateway": "b"},
    }  # fmt: skip
    host = Hostile(f"answer({{}} if verb == 'stop' else {{'specs': [{spec!r}]}})")
    said = problem(restart_all([host], part=None, timeout_s=1.0))
    assert said.startswith("b says that it runs the server of a replica, but no replica has it")


def test_a_line_of_a_log_is_no_line_of_another_host(capsys):
    lines = msgspec.to_builtins(LogLines(lines=["one\nc error: two", "[link=http://x]y[/link]"], over=True))
    asyncio.run(logs_command._show([Hostile(f"answer({lines!r})")], LogRequest(lines=9, follow=False)))
    assert capsys.readouterr().out.splitlines() == ["b one c error: two", "b [link=http://x]y[/link]"]


def test_a_log_without_end_is_an_error(capsys):
    more = "answer({'lines': ['x'] * 9})"
    asyncio.run(logs_command._show([Hostile(f"while True: {more}")], LogRequest(lines=9, follow=False)))
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("b sends more than the 9 lines that it was asked for.")


def test_what_was_ended_is_one_line_of_its_host(capsys):
    host = Hostile("answer({'found': ['x\\nc: still there: y'], 'left': ['z\\nc: w']})")
    down_command.report(asyncio.run(stop_all([host], timeout_s=1.0)))
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["b", "b"]


def test_more_processes_than_a_host_has_are_refused():
    assert "left" in problem(Hostile("answer({'left': ['x'] * 99_999})").call("stop", {}, Stopped))


# Models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """Of more bytes than pipes hold."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "w").write_bytes(os.urandom(4 << 20))
    yield tmp_path


def pushed(model: Path, script: str) -> list[int]:
    """Push to a host that lacks everything, and takes files as `script` does. Returns the bytes of each progress.

    Raises:
        ClusterError: the host's.
    """
    counts: list[int] = []
    host = Hostile(f"if verb == 'inventory': answer({HAS_NOTHING}); sys.exit()\n{script}")
    try:
        asyncio.run(push(str(model), prepare(str(model)), [host], lambda name, count: counts.append(count)))
    except* ClusterError as errors:
        (error,) = errors.exceptions
        raise error from None
    return counts


TAKES = """
if verb == 'take':
    request = json.loads(asked.readline())
    size = len(asked.read(request['entry']['bytes']))
    answer({'path': request['entry']['path'], 'bytes': size})
if verb == 'finish': answer({'directory': 'd'})
"""


def test_a_push_to_a_talkative_host_is_whole(model):
    """It says more before it reads than the pipes hold."""
    said = "print('motd\\n' * 999_999); sys.stderr.write('x' * (8 << 20))\n"
    assert sum(pushed(model, said + TAKES)) == (4 << 20) + 2


def test_a_host_that_never_says_what_it_has_is_named(model, monkeypatch):
    """Within a time that the model's size allows."""
    monkeypatch.setattr(distribution, "PART_S", 0.5)
    with pytest.raises(ClusterError, match=r"b gave no answer to `phalanx host inventory` within 0.50\d* s"):
        asyncio.run(_inventory(model))


async def _inventory(model: Path) -> None:
    (found,) = (await distribution.lacking(prepare(str(model)), [Hostile("time.sleep(99)")])).values()
    assert isinstance(found, ClusterError)
    raise found


def test_a_host_that_takes_no_bytes_is_named_with_the_file(model, monkeypatch):
    monkeypatch.setattr(ssh, "BLOCK_TIMEOUT_S", 0.5)
    monkeypatch.setitem(globals(), "HAS_NOTHING", HAS_NOTHING.replace("('config.json', 'w')", "('w',)"))
    with pytest.raises(ClusterError, match=r"b gave no answer to `phalanx host take w` within 0.5 s"):
        pushed(model, "if verb == 'take': time.sleep(99)")


@pytest.mark.parametrize(
    "answer", ["sys.stdout.buffer.write(b'\\xff\\xfe\\n')", f"print('{ANSWER}' + '{{')", "answer({'path': 7})"]
)
def test_what_is_no_answer_to_a_file_is_an_error(model, answer):
    with pytest.raises(ClusterError, match=r"^b"):
        pushed(model, f"if verb == 'take': {answer}")


def test_a_file_that_a_host_names_often_is_sent_once(model, monkeypatch):
    monkeypatch.setitem(globals(), "HAS_NOTHING", HAS_NOTHING.replace("('config.json', 'w')", "('w',) * 50"))
    assert pushed(model, TAKES) == [2, *[1 << 20] * 4]  # config.json is there already


def test_a_host_that_has_more_than_there_is_of_a_file_is_an_error(model, monkeypatch):
    monkeypatch.setitem(globals(), "HAS_NOTHING", HAS_NOTHING.replace("'have': 0", "'have': 10 ** 15"))
    with pytest.raises(ClusterError, match=r"b says that it has 1000000000000000 bytes of config.json, of 2"):
        pushed(model, TAKES)


def test_a_file_that_is_gone_is_named(model):
    wanted = prepare(str(model))
    entry = replace(wanted.files[-1], path="gone")
    with pytest.raises(ClusterError, match="gone cannot be read: No such file"):
        asyncio.run(distribution._send(model / "gone", "p", entry, 0, Hostile(TAKES), lambda name, count: None))


def test_a_pull_whose_first_host_does_not_reach_the_others_says_that_it_must():
    script = "if verb == 'c,d': sys.stderr.write('error: c: The host cannot be reached.'); sys.exit(65)"
    said = problem(pull("m", Hostile(script), ["c", "d"], lambda _: None))
    assert "c: The host cannot be reached." in said
    assert "b copies the model, so it must reach c, d through ssh." in said and "`phalanx model push m`" in said
    script = "sys.stderr.write('error: no such model'); sys.exit(65)"
    assert "must reach" not in problem(pull("m", Hostile(script), ["c"], lambda _: None))


def test_a_pull_shows_no_commands_of_a_host_to_the_terminal():
    told: list[str] = []
    asyncio.run(pull("m", Hostile("print('\\x1b]52;c;eA==\\x07' + 'x' * 99_999)"), ["c"], told.append))
    assert "\x1b" not in "".join(told) and r"\x1b]52;c;eA==\x07" in told[1] and len(told[1]) < 2 * TEXT_CHARS
