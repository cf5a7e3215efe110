"""Every check of the doctor, provoked on real hosts: it is named, and gone when its remedy is followed (L2, F5-F7).

A row: what goes wrong, what the doctor must say of it, and what its remedy comes to on the rig.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from clusters import assert_nothing_left, phalanx, wait_for
from mac import Mac
from rig import Host, Rig

from phalanx.faults import recognise
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import write_credentials

HOSTFILE = [
    {"ssh": "a", "ips": ["10.77.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "b", "ips": ["10.77.0.2"], "rdma": ["rdma_en3", None]},
]
LISTEN = """
import socket
server = socket.create_server(("", {port}))
print("listening", flush=True)
while True:
    print("somebody came", server.accept()[1], flush=True)
"""


@dataclass
class Scene:
    """The rig while a row is played."""

    rig: Rig
    macs: dict[str, Mac] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=lambda: ["2.json"])
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def desk(self) -> Host:
        return self.rig["desk"]

    @property
    def a(self) -> Host:
        return self.rig["a"]

    @property
    def b(self) -> Host:
        return self.rig["b"]

    def doctor(self) -> tuple[int, list[dict[str, str]]]:
        """Exit code, and results that are not ok, each with its host."""
        done = phalanx(self.desk, "doctor", *self.hosts, *self.flags, "--json", check=False)
        assert done.stdout.startswith("{"), done.stderr
        found = json.loads(done.stdout)["results"]
        flat = [{"host": host, **one} for host, ones in found.items() for one in ones]
        return done.returncode, [one for one in flat if one["level"] != "ok"]

    def library_says(self, host: Host, text: str) -> None:
        """Another state of software or hardware than the rig has, said by the library that is asked for it."""
        folder = host.home / "lib"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(text)
        self.stack.callback(lambda: (folder / "sitecustomize.py").unlink(missing_ok=True))

    def runs(self, host: Host, *command: str) -> Any:
        """A process on a host while the row is played."""
        process = host.popen(command)

        def end() -> None:
            process.terminate()
            process.wait()

        self.stack.callback(end)
        return process

    def model(self, host: Host, text: str = "{}") -> None:
        folder = host.home / "models" / "m"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(text)
        (folder / "model.safetensors").write_bytes(b"w" * 1000)


Play = Callable[[Scene], None]


@dataclass(frozen=True)
class Row:
    name: str
    provoke: Play
    host: str
    check: str
    remedy: Play
    mac: bool = False
    level: str = "bad"
    also: tuple[str, ...] = ()  # checks that may complain as well


def ssh_config(scene: Scene, text: str) -> None:
    (scene.desk.home / ".ssh/config").write_text(text)


def keep(path: str) -> Play:
    """Put a file of the desk's ssh back as it was, when the row is over."""

    def remember(scene: Scene) -> None:
        file = scene.desk.home / ".ssh" / path
        text = file.read_text()
        scene.stack.callback(lambda: file.write_text(text))

    return remember


def both(*plays: Play) -> Play:
    def play(scene: Scene) -> None:
        for each in plays:
            each(scene)

    return play


def refused(scene: Scene) -> None:
    keep("config")(scene)
    ssh_config(scene, "Host a\n HostName 10.77.0.1\nHost b\n HostName 10.77.0.2\n Port 2222\n")


def resolved(scene: Scene) -> None:
    ssh_config(scene, "Host a\n HostName 10.77.0.1\nHost b\n HostName 10.77.0.2\n")


def through_a_jump_host(scene: Scene) -> None:
    """To a port that refuses at once: an address that nothing has takes three of the four seconds that ssh waits."""
    keep("config")(scene)
    ssh_config(scene, "Host a\n HostName 10.77.0.1\nHost b\n HostName 10.77.0.2\n Port 1\n ProxyJump a\n")


def unknown_name(scene: Scene) -> None:
    keep("config")(scene)
    ssh_config(scene, "Host a\n HostName 10.77.0.1\n")


def no_known_hosts(scene: Scene) -> None:
    keep("known_hosts")(scene)
    (scene.desk.home / ".ssh/known_hosts").write_text("")


def accept_keys(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.desk.run(["ssh", "-o", "StrictHostKeyChecking=accept-new", name, "true"])


def other_keys(scene: Scene) -> None:
    keep("known_hosts")(scene)
    known = scene.desk.home / ".ssh/known_hosts"
    lines = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    lines["10.77.0.2"] = lines["10.77.0.1"]
    known.write_text("".join(f"{host} {key}\n" for host, key in lines.items()))


def forget_keys(scene: Scene) -> None:
    scene.desk.run(["ssh-keygen", "-R", "10.77.0.2"])
    accept_keys(scene)


def locked_out(scene: Scene) -> None:
    file = scene.b.home / ".ssh/authorized_keys"
    text = file.read_text()
    scene.stack.callback(lambda: file.write_text(text))
    file.write_text("")


def let_in(scene: Scene) -> None:
    (scene.b.home / ".ssh/authorized_keys").write_text((scene.a.home / ".ssh/authorized_keys").read_text())


def other_python(scene: Scene) -> None:
    scene.flags += ["--python", "/nowhere/python"]


def this_python(scene: Scene) -> None:
    scene.flags.clear()


def stray(scene: Scene) -> None:
    scene.stack.callback(scene.b.reboot)
    credentials = scene.b.home / "stray.json"
    write_credentials(credentials, make_credentials(["a", "b"])[1])
    scene.stack.callback(credentials.unlink)
    scene.b.popen(["phalanx", "agent", "--port", "4444", "--directory", "/tmp/stray", "--credentials", "stray.json"])
    while 4444 not in scene.b.listening():
        time.sleep(0.05)


def forced_down(scene: Scene) -> None:
    phalanx(scene.desk, "down", "--hosts", "b", "--force")


def taken(name: str, port: int) -> Play:
    def play(scene: Scene) -> None:
        host = scene.rig[name]
        process = scene.runs(host, "python", "-c", LISTEN.format(port=port))
        assert process.stdout.readline() == "listening\n"
        scene.macs.setdefault("listener", process)

    return play


def free(name: str, word: str, *, visited: bool = False) -> Play:
    """End what has the port. Nobody may have connected to it, unless it is an agent's: those are asked whether they are
    there."""

    def play(scene: Scene) -> None:
        host = scene.rig[name]
        for pid, args in host.processes(word).items():
            if "socket.create_server" in args:
                host.run(["kill", "-INT", str(pid)])
        listener: Any = scene.macs.pop("listener")
        assert ("somebody came" in listener.stdout.read()) is visited

    return play


def wants_model(scene: Scene) -> None:
    scene.flags += ["--model", "~/models/m"]


def push(scene: Scene) -> None:
    scene.model(scene.desk)
    phalanx(scene.desk, "model", "push", "models/m", "--hosts", "a,b")


def big_guard(scene: Scene) -> None:
    scene.flags += ["--model", "demo", "--memory-guard-gb", "100000"]


def small_guard(scene: Scene) -> None:
    scene.flags[-1] = "0.1"


def held(scene: Scene) -> None:
    folder = scene.b.home / ".phalanx/run"
    folder.mkdir(parents=True)
    (folder / "hold").write_text(str(time.time() + 30))


def wait_out(scene: Scene) -> None:
    """As if the 30 seconds had passed."""
    (scene.b.home / ".phalanx/run/hold").write_text(str(time.time()))


def wrong_address(scene: Scene) -> None:
    wrong = [dict(one) for one in json.loads((scene.desk.home / "2.json").read_text())]
    wrong[1]["ips"] = ["10.77.0.1"]
    wrong[0]["ips"] = ["10.77.0.2"]
    (scene.desk.home / "wrong.json").write_text(json.dumps(wrong))
    scene.hosts = ["wrong.json"]


def written_anew(scene: Scene) -> None:
    phalanx(scene.desk, "hostfile", "a,b", "-o", "right.json")
    scene.hosts = ["right.json"]


def no_way(scene: Scene) -> None:
    scene.a.run(["ip", "route", "add", "unreachable", "10.77.0.2"])
    scene.stack.callback(lambda: scene.a.run(["ip", "route", "del", "unreachable", "10.77.0.2"], check=False))


def way(scene: Scene) -> None:
    scene.a.run(["ip", "route", "del", "unreachable", "10.77.0.2"])


def says(name: str, text: str) -> Play:
    return lambda scene: scene.library_says(scene.rig[name], text)


def as_it_is(name: str) -> Play:
    return lambda scene: (scene.rig[name].home / "lib/sitecustomize.py").unlink()


def mac(name: str, key: str, value: Any) -> Play:
    def play(scene: Scene) -> None:
        scene.macs[name][key] = value

    return play


def setup(scene: Scene) -> None:
    phalanx(scene.desk, "net", "setup", "--node", "a:en5:10.90.0.1", "--node", "b:en3:10.90.0.2")


def unplugged(scene: Scene) -> None:
    scene.b.run(["ip", "link", "set", "en3", "down"])  # by the rig's hand: as if the cable were out


def plugged(scene: Scene) -> None:
    scene.b.run(["ip", "link", "set", "en3", "up"])
    for host, port in ((scene.a, "en5"), (scene.b, "en3")):  # the system says so a moment later
        link = ["ip", "-json", "link", "show", "dev", port]
        wait_for(
            lambda host=host, link=link: json.loads(host.run(link).stdout)[0]["operstate"] == "UP",
            f"{port} of {host.name} is up",
        )


def wifi_addresses(scene: Scene) -> None:
    ports = scene.macs["a"]["ports"]
    scene.macs["a"]["ports"] = {**ports, "eth0": "Wi-Fi"}
    scene.a.run(["ip", "address", "add", "10.77.0.201/24", "dev", "en5"])


def other_addresses(scene: Scene) -> None:
    scene.a.run(["ip", "address", "del", "10.77.0.201/24", "dev", "en5"])


OTHER_VERSION = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "0.0.1" if name == {package!r} else real(name)
"""
NOT_INSTALLED = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "mlx":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""
LATE = "import time\nreal = time.time\ntime.time = lambda: real() + 3600\n"
FULL = """
import collections, shutil
shutil.disk_usage = lambda path: collections.namedtuple("U", "total used free")(9, 8, 1)
"""
FEW = "import resource\nresource.getrlimit = lambda which: (256, 256)\n"
OLD_PYTHON = "import platform\nplatform.python_version = lambda: '3.9.9'\n"

ROWS = (
    # ssh
    Row("no ssh server", refused, "b", "ssh-refused", resolved),
    Row("a host that is off", lambda s: s.b.cut(), "b", "host-unreachable", lambda s: s.b.mend(), also=("reaches",)),
    Row("a name nobody knows", unknown_name, "b", "ssh-name-unknown", resolved),
    Row("a host never met", no_known_hosts, "b", "ssh-host-key-unknown", accept_keys, also=("ssh-host-key-unknown",)),
    Row("a host with another key", other_keys, "b", "ssh-host-key-changed", forget_keys),
    Row("a key that is refused", locked_out, "b", "ssh-key-refused", let_in),
    Row("a jump host that does not get through", through_a_jump_host, "b", "ssh-jump", resolved),
    Row("phalanx not installed", other_python, "b", "phalanx-missing", this_python, also=("phalanx-missing",)),
    # software and files
    Row("no engine", says("b", NOT_INSTALLED), "b", "engine", as_it_is("b"), also=("version of mlx",)),
    Row(
        "another MLX", says("b", OTHER_VERSION.format(package="mlx")), "between hosts", "version of mlx", as_it_is("b")
    ),
    Row(
        "another mlx-lm", says("b", OTHER_VERSION.format(package="mlx-lm")), "between hosts", "version of mlx-lm",
        as_it_is("b"),
    ),
    Row("another Python", says("a", OLD_PYTHON), "between hosts", "version of python", as_it_is("a")),
    Row("a clock that is wrong", says("b", LATE), "b", "clock", as_it_is("b"), level="warning"),
    Row("a full disk", says("b", FULL), "b", "disk", as_it_is("b"), level="warning"),
    Row("few open files", says("a", FEW), "a", "open files", as_it_is("a"), level="warning"),
    Row(
        "a model that is missing", both(wants_model, lambda s: s.model(s.a)), "b", "model", push, also=("same model",)
    ),
    Row(
        "a model that differs", both(wants_model, lambda s: s.model(s.a), lambda s: s.model(s.b, '{"x": 1}')),
        "between hosts", "same model", push,
    ),
    # memory, processes, ports
    Row("too little memory", big_guard, "a", "memory", small_guard, also=("memory",)),
    Row("left-over processes", stray, "b", "left-over processes", forced_down),
    Row("a kill a moment ago", held, "b", "hold", wait_out, level="warning"),
    Row("the API's port", taken("a", 8000), "a", "API port", free("a", "8000")),
    Row("the agent's port", taken("b", 32330), "b", "agent port", free("b", "32330", visited=True)),
    # networks
    Row("wrong addresses", wrong_address, "b", "address", written_anew, also=("address",)),
    Row("hosts that do not reach each other", no_way, "a", "reaches", way),
    # Macs
    Row("wired memory", mac("a", "wired_pages", 24_000_000), "a", "wired memory", mac("a", "wired_pages", 1), mac=True),
    Row("RDMA disabled", mac("b", "rdma", False), "b", "RDMA", mac("b", "rdma", True), mac=True),
    Row(
        "an RDMA device that is missing", mac("b", "thunderbolt", []), "b", "RDMA device",
        mac("b", "thunderbolt", ["en3"]), mac=True, also=("cable a - b",),
    ),
    Row(
        "no device matrix", lambda s: s.hosts.__setitem__(0, "2.json"), "b", "device matrix",
        both(setup, written_anew), mac=True, also=("device matrix",),
    ),
    Row("members of the bridge", mac("a", "members", ["en5"]), "a", "bridge", setup, mac=True, also=("cable a - b",)),
    Row("the bridge is up", mac("b", "bridge_up", True), "b", "bridge", setup, mac=True, also=("cable a - b",)),
    Row("a cable that is out", unplugged, "between hosts", "cable a - b", plugged, mac=True),
    Row("the coordinator's port", taken("a", 32323), "a", "coordinator port", free("a", "32323"), mac=True),
    Row("cables in the Wi-Fi's network", wifi_addresses, "a", "subnet", other_addresses, mac=True),
    Row("macOS keeps Python from the network", no_way, "a", "reaches", way, mac=True),
)  # fmt: skip


@pytest.fixture
def scene(hosts: Rig) -> Iterator[Scene]:
    played = Scene(hosts)
    with played.stack:
        yield played


@pytest.fixture
def macs(scene: Scene) -> Scene:
    """a and b as Macs with a cable, set up as they should be."""
    scene.stack.enter_context(scene.rig.cable("a", "en5", "b", "en3"))
    scene.macs = {"a": Mac(scene.a, ["en5"]), "b": Mac(scene.b, ["en3"])}
    for made in scene.macs.values():
        scene.stack.callback(made.remove)
        made["members"], made["bridge_up"] = [], False
    (scene.desk.home / "macs.json").write_text(json.dumps(HOSTFILE))
    scene.hosts, scene.flags = ["macs.json"], ["--backend", "jaccl"]
    return scene


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_wrong_is_named_and_its_remedy_helps(row: Row, request: pytest.FixtureRequest):
    scene: Scene = request.getfixturevalue("macs" if row.mac else "scene")
    row.provoke(scene)
    code, found = scene.doctor()
    named = [one for one in found if (one["host"], one["check"]) == (row.host, row.check)]
    assert named and named[0]["level"] == row.level, found
    assert named[0]["seen"] and named[0]["remedy"]
    assert {one["check"] for one in found} <= {row.check, *row.also}, found
    assert code == (20 if any(one["level"] == "bad" for one in found) else 10)
    row.remedy(scene)
    code, found = scene.doctor()
    assert (code, found) == (0, [])


def test_there_are_rows_enough():
    assert len(ROWS) >= 25 and len({row.name for row in ROWS}) == len(ROWS)


def test_all_is_well(scene: Scene):
    assert scene.doctor() == (0, [])
    assert "2 hosts" in phalanx(scene.desk, "doctor", "2.json").stdout


def test_the_hint_on_local_network_privacy(macs: Scene):
    no_way(macs)
    _, found = macs.doctor()
    assert "Local Network" in next(one["remedy"] for one in found if one["check"] == "reaches")


FAULTS = {
    "[jaccl] Changing queue pair to RTR failed with errno 22": "rdma-bridge-up",
    "[jaccl] Changing queue pair to RTR failed with errno 60": "rdma-bridge-member",
    "[jaccl] Changing queue pair to RTR failed with errno 96": "rdma-gid-table",
    "[jaccl] Couldn't allocate protection domain": "rdma-ports-down",
    "[jaccl] Recv failed with error -12": "rdma-no-memory",
    "[jaccl] The device file should start with an array": "rdma-device-file",
    "[jaccl] Recv failed with errno=2": "coordinator-port",
}
ALWAYS = "rdma-bridge-up"  # a whole start; `make soak` plays the others, whose texts the unit tests have
DYING_RANK = "import sys, os\nif 'rank' in sys.orig_argv:\n    sys.stderr.write({line!r} + '\\n')\n    os._exit(64)\n"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        pytest.param(line, name, id=name, marks=() if name == ALWAYS else pytest.mark.soak)
        for line, name in FAULTS.items()
    ],
)
def test_up_names_the_fault_in_a_ranks_log(scene: Scene, line: str, name: str):
    """What MLX's RDMA backend says where it fails; a rank that says it stands for the Mac we have not."""
    scene.library_says(scene.b, DYING_RANK.format(line=line))
    done = phalanx(scene.desk, "up", "2.json", "--backend", "ring", "--", "demo", check=False)
    assert done.returncode != 0
    assert name in done.stderr or line in done.stderr, done.stderr
    assert recognised(done.stderr, line), done.stderr
    assert_nothing_left(scene.rig)


def recognised(text: str, line: str) -> bool:
    fault = recognise(line)
    assert fault is not None
    flat = " ".join(text.split())
    return fault.cause in flat and fault.remedy in flat
