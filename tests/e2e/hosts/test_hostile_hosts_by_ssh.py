"""A host that was taken over, and settings of the user's ssh that are for sessions by hand: over real ssh.

`tests/unit/cluster/test_hostile_hosts.py` has the rest of what such a host may say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from clusters import phalanx
from rig import Host, Rig

SESSIONS_BY_HAND = """
  RequestTTY force
  RemoteCommand cat
  ForwardAgent yes
  ForwardX11 yes
  ExitOnForwardFailure yes
  LocalForward 9999 localhost:22
"""


@contextmanager
def ssh_file(host: Host, name: str, text: str) -> Iterator[None]:
    """Meanwhile a file of a host's ssh has this text, followed by its own."""
    file = host.home / ".ssh" / name
    before = file.read_text()
    file.write_text(text + before)
    try:
        yield
    finally:
        file.write_text(before)


@contextmanager
def taken_over(host: Host, script: str) -> Iterator[None]:
    """Meanwhile every command by ssh runs this script there instead; $SSH_ORIGINAL_COMMAND is what was asked for."""
    (host.home / "instead").write_text(script)
    with ssh_file(host, "authorized_keys", 'command="sh ~/instead" '):
        yield


def test_settings_for_sessions_by_hand_break_no_command(hosts: Rig) -> None:
    with ssh_file(hosts["desk"], "config", f"Host *{SESSIONS_BY_HAND}"):
        said = phalanx(hosts["desk"], "status", "--hosts", "a,b,c", check=False).stdout
    assert [line.split()[1:3] for line in said.splitlines()[1:]] == [[name, "down"] for name in "abc"]


def test_the_agent_of_the_user_stays_at_home(hosts: Rig) -> None:
    """But for a pull, where the first host has to reach the others."""
    desk = hosts["desk"]
    shows = "echo AGENT=$SSH_AUTH_SOCK. >&2; exit 1\n"
    with ssh_file(desk, "config", "Host *\n  ForwardAgent yes\n"), taken_over(hosts["b"], shows):
        assert "AGENT=." in desk.run(["ssh-agent", "phalanx", "status", "--hosts", "b"], check=False).stdout
    with ssh_file(desk, "config", "Host *\n  ForwardAgent yes\n"):
        pulled = 'case "$SSH_ORIGINAL_COMMAND" in *" pull "*) exit 0;; esac\n' + shows
        with taken_over(hosts["b"], pulled):
            said = desk.run(["ssh-agent", "phalanx", "model", "pull", "m", "--hosts", "b,a"], check=False).stderr
    assert "b: `phalanx model` ended with status 1 there: AGENT=/tmp/" in said


def test_a_jump_host_that_is_not_known_asks_nothing(hosts: Rig) -> None:
    """ssh starts another ssh to reach it, which does not know that nobody is to be asked."""
    desk, known = hosts["desk"], hosts["desk"].home / ".ssh" / "known_hosts"
    before = known.read_text()
    known.write_text("".join(line for line in before.splitlines(keepends=True) if "10.77.0.1 " not in line))
    try:
        with ssh_file(desk, "config", "Host b\n  HostName 10.77.0.2\n  ProxyJump a\n"):
            said = desk.run(["script", "-qec", "phalanx status --hosts b", "/dev/null"], check=False).stdout
    finally:
        known.write_text(before)
    assert "ssh-host-key-unknown" in said and "authenticity" not in said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("yes 'stands at ' | head -c 20000000 | tr -d '\\n'; exit 1\n", "stands at stands at"),
        ("head -c 50000000 /dev/zero; exit 7\n", r"ended with status 7 there: \x00"),
        ("printf '\\033]52;c;eA==\\007'; exit 3\n", r"ended with status 3 there: \x1b]52;c;eA==\x07"),
        ("exec 1>&-; exit 0\n", "ended with status 0 there: it said nothing"),
        ("kill -9 $PPID; sleep 9\n", "b: ssh failed (`phalanx host status`): "),
    ],
)
def test_what_a_host_says_instead_is_named_with_host_and_command(hosts: Rig, script: str, said: str) -> None:
    with taken_over(hosts["b"], script):
        done = hosts["desk"].run(["phalanx", "status", "--hosts", "b"], check=False)
    text = " ".join(done.stdout.split())
    assert "`phalanx host status`" in text and said in text and "\x1b" not in done.stdout
    assert len(done.stdout) < 10_000 and done.stderr == ""


def test_a_model_comes_whole_to_a_host_that_talks(hosts: Rig) -> None:
    folder = hosts["desk"].home / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(8 << 20))
    talks = 'yes motd | head -c 9000000; yes motd | head -c 9000000 >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    with taken_over(hosts["b"], talks):
        said = phalanx(hosts["desk"], "model", "push", "models/m", "--hosts", "b").stdout
    assert "2 files" in said and "verified on 1 hosts" in said
    assert (hosts["b"].home / "models/m/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_pull_shows_nothing_of_a_host_as_it_came(hosts: Rig) -> None:
    with taken_over(hosts["b"], "printf '\\033]52;c;eA==\\007'\n"):
        said = hosts["desk"].run(["phalanx", "model", "pull", "m", "--hosts", "b"]).stdout
    assert said == "b$ phalanx pull m\n\\x1b]52;c;eA==\\x07\n"
