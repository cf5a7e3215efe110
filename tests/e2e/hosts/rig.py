"""Machines on one machine: each a set of namespaces with its own name, network, processes, /tmp, shared memory, home
directory and a real sshd; one switch between them. Links can be cut and delayed, hosts killed and started again.

    desk, a, b, c, d     10.77.0.10, .1, .2, .3, .4 on a bridge that lives in a namespace of its own

Everything ends with the test process, however that ends: the namespaces go, and with them links and mounts. Needs root
and Linux. Does not know phalanx.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

SUBNET = "10.77.0"
NUMBERS = {"desk": 10, "a": 1, "b": 2, "c": 3, "d": 4}
WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]
UNSHARE = [*WITH_US, "unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WAIT_S = 10.0
HOME = Path(pwd.getpwuid(os.geteuid()).pw_dir)  # what ssh takes for it, whatever the variable says
CHECKOUT = Path(__file__).resolve().parents[3]
OURS = (Path(sys.prefix).resolve(), CHECKOUT)


def why_not() -> str:
    """Why the rig cannot be built here; "" if it can."""
    if sys.platform != "linux":
        return "needs Linux, for namespaces"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    command = ["sh", str(CHECKOUT / "tools/rig_packages.sh"), "missing"]
    if missing := subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip():
        return f"needs {missing}"
    probe = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "x", "/dev/shm"], capture_output=True, text=True)
    return f"namespaces are not permitted: {probe.stderr.strip()}" if probe.returncode else ""


class Host:
    """One machine of the rig.

    Args:
        folder: of this host's home directory and sshd; it outlives `kill`, like a disk.
        variables: environment of everything that ssh starts here.
        bare: there is Python, but neither this checkout nor its environment.
    """

    def __init__(
        self, name: str, folder: Path, switch: Switch, variables: Mapping[str, str], *, bare: bool = False
    ) -> None:
        self.name = name
        self._bare = bare
        self.address = f"{SUBNET}.{NUMBERS[name]}"
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.variables = {
            **variables,
            "HOME": str(HOME),
            "PATH": f"{self.bin}:{variables.get('PATH', SYSTEM_PATH)}",
        }
        self._folder = folder
        self._switch = switch
        self._init: subprocess.Popen[bytes] | None = None
        for made in (self.home / ".ssh", self.bin):
            made.mkdir(parents=True)
        (self.home / ".ssh").chmod(0o700)

    # -- its life --------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start it; returns when its sshd answers."""
        key = self._folder / "host_key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        config = self._folder / "sshd_config"
        settings = " ".join(f'"{name}={value}"' for name, value in self.variables.items())
        config.write_text(
            f"Port 22\nHostKey {key}\nPidFile none\nUsePAM no\nPermitRootLogin yes\nStrictModes no\n"
            f"PasswordAuthentication no\nAuthorizedKeysFile {HOME}/.ssh/authorized_keys\nMaxStartups 50\n"
            f"SetEnv {settings}\n"
        )
        script = (
            f"set -e; hostname {self.name}; {self._hide_directories()}; "
            "mount -t tmpfs shm /dev/shm; chmod 1777 /dev/shm; mount -t tmpfs run /run; mkdir /run/sshd; "
            f"ip link set lo up; read _; exec $(command -v sshd) -D -E {self._folder}/sshd.log -f {config}"
        )
        self._init = subprocess.Popen(
            [*UNSHARE, "sh", "-c", script],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": SYSTEM_PATH},
        )
        pid = self.pid
        self._switch.plug(self, pid)
        assert self._init.stdin is not None
        self._init.stdin.write(b"\n")
        self._init.stdin.close()
        deadline = time.monotonic() + WAIT_S
        while self.run(["sh", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"], shell="bash", check=False).returncode:
            assert time.monotonic() < deadline and self._init.poll() is None, f"{self.name}: sshd does not start"
            time.sleep(0.02)

    def _hide_directories(self) -> str:
        """A /tmp and a home directory of its own; the Python that runs this stays visible where it lies in them."""
        needed = {f"{self._folder}/needed{i}": path for i, path in enumerate(hidden(bare=self._bare))}
        for place in needed:
            Path(place).mkdir(exist_ok=True)
        steps = [
            *(f"mount --rbind {path} {place}" for place, path in needed.items()),
            "mount -t tmpfs tmp /tmp; chmod 1777 /tmp",
            f"mkdir -p {HOME}; mount --rbind {self.home} {HOME}",
            *(f"mkdir -p {path}; mount --rbind {place} {path}" for place, path in needed.items()),
            *(f"[ ! -e {path} ] || mount -t tmpfs none {path}" for path in (OURS if self._bare else ())),
        ]
        return "; ".join(steps)

    @property
    def pid(self) -> int:
        """Of its first process, as seen from here."""
        assert self._init is not None, f"{self.name} is off"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        deadline = time.monotonic() + WAIT_S
        while not (text := children.read_text()) or Path(f"/proc/{text.split()[0]}/comm").read_text() == "unshare\n":
            assert time.monotonic() < deadline, f"{self.name} does not start"
            time.sleep(0.01)
        return int(text.split()[0])

    def kill(self) -> None:
        """Pull the plug: every process is gone at once; what was on its disk stays, /tmp does not."""
        if self._init is not None:
            self._init.send_signal(signal.SIGKILL)
            self._init.wait()
            self._init = None

    def forget(self) -> None:
        """Empty the home directory, but for ssh's part and what is mounted there."""
        keep = {".ssh", *(path.relative_to(HOME).parts[0] for path in hidden() if path.is_relative_to(HOME))}
        for found in self.home.iterdir():
            if found.name not in keep:
                shutil.rmtree(found) if found.is_dir() else found.unlink()

    def inside_home(self, path: str) -> Path:
        """A path below the home directory, as processes there see it."""
        return HOME / path

    def reboot(self) -> None:
        self.kill()
        self.boot()

    # -- its link --------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take its cable out, at the switch: its own interface stays up without carrier, as with a dead switch port."""
        self._switch.set_port(self.name, "down")

    def mend(self) -> None:
        """Put it in again. Nothing that was looked for in vain meanwhile is still thought to be away."""
        self._switch.set_port(self.name, "up")
        flush = ["nsenter", "--target", str(self.pid), "--net", "ip", "neighbour", "flush", "all"]
        subprocess.run(flush, check=False, capture_output=True)  # a host that is off has none

    @contextmanager
    def delayed(self, milliseconds: float) -> Iterator[None]:
        """Meanwhile everything takes so long to this host, and as long from it."""
        with self._switch.delayed(self.name, milliseconds):
            yield

    # -- what runs there -------------------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        *,
        check: bool = True,
        timeout: float = 400.0,
        shell: str | None = None,
        variables: Mapping[str, str] | None = None,
        text_in: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as somebody at this machine's keyboard.

        Args:
            shell: replaces the first word, for what only one shell can do.
        """
        words = [shell, *command[1:]] if shell else list(command)
        done = subprocess.run(
            self.inside(words), env={**self.variables, **(variables or {})}, input=text_in or "", timeout=timeout,
            capture_output=True, text=True,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{self.name}$ {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def popen(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command at this machine's keyboard, in a session of its own. Ending what is returned kills it."""
        # Ctrl-C works at a keyboard, whether or not the tests were started in the background, where it is ignored.
        return subprocess.Popen(
            self.inside(["env", "--default-signal=INT", "setpriv", "--pdeathsig", "KILL", *command]),
            env=dict(self.variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--all", f"--wdns={HOME}", "--", *command]

    def processes(self, word: str = "") -> dict[int, str]:
        """Process id (as this host counts) -> command line, of those that contain a word."""
        lines = self.run(["ps", "-eww", "-o", "pid=,args="]).stdout.splitlines()
        found = {int(pid): args for pid, _, args in (line.strip().partition(" ") for line in lines)}
        return {pid: args for pid, args in found.items() if word in args and not args.startswith("ps -eww")}

    def listening(self) -> set[int]:
        """TCP ports that somebody listens on."""
        lines = self.run(["ss", "-Hltn"]).stdout.splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def hidden(*, bare: bool = False) -> list[Path]:
    """Directories that hosts need and that their own /tmp or home directory would hide."""
    needed = {Path(sys.base_prefix).resolve(), *(() if bare else OURS)}
    return sorted(path for path in needed if path.is_relative_to(HOME) or path.is_relative_to("/tmp"))


def port(name: str) -> str:
    """Of the switch, for a host."""
    return f"port-{name}"


class Switch:
    """A bridge in a namespace of its own."""

    def __init__(self) -> None:
        self._init = subprocess.Popen(
            [*WITH_US, "unshare", "--net", "--", "sleep", "infinity"], start_new_session=True, env={"PATH": SYSTEM_PATH}
        )
        deadline = time.monotonic() + WAIT_S
        while Path(f"/proc/{self._init.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._ip("link", "add", "switch", "type", "bridge", "forward_delay", "0")
        self._ip("link", "set", "switch", "up")

    def plug(self, host: Host, pid: int) -> None:
        """Give a host its interface eth0 and its address."""
        deadline = time.monotonic() + WAIT_S
        while self._ip("link", "show", "dev", port(host.name), check=False) == 0:  # of its earlier life, going away
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self._ip("link", "add", "name", port(host.name), "type", "veth", "peer", "name", "eth0",
                 "address", f"02:00:00:00:00:{NUMBERS[host.name]:02d}", "netns", str(pid))  # fmt: skip
        self._ip("link", "set", "dev", port(host.name), "master", "switch", "up")
        inside = ["nsenter", "--target", str(pid), "--net", "ip"]
        subprocess.run([*inside, "address", "add", f"{host.address}/24", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)

    def set_port(self, name: str, state: str) -> None:
        self._ip("link", "set", "dev", port(name), state)

    @contextmanager
    def delayed(self, name: str, milliseconds: float) -> Iterator[None]:
        """A relay (`relay.py`) between a host's port and the switch."""
        self._ip("link", "add", "name", "wire", "type", "veth", "peer", "name", "relay")
        for end in ("wire", "relay"):
            self._ip("link", "set", "dev", end, "up")
        self._ip("link", "set", "dev", port(name), "nomaster")
        self._ip("link", "set", "dev", "wire", "master", "switch")
        script = [sys.executable, str(Path(__file__).with_name("relay.py"))]
        command = ["nsenter", "--target", str(self._init.pid), "--net", "--", *WITH_US, *script, port(name), "relay"]
        process = subprocess.Popen([*command, str(milliseconds)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()
            process.communicate()
            self._ip("link", "del", "dev", "wire")
            self._ip("link", "set", "dev", port(name), "master", "switch", check=False)

    def _ip(self, *words: str, check: bool = True) -> int:
        command = ["nsenter", "--target", str(self._init.pid), "--net", "ip", *words]
        return subprocess.run(command, check=check, capture_output=not check).returncode

    def close(self) -> None:
        self._init.kill()
        self._init.wait()


class Rig:
    """Hosts by name; every host may ssh to every other by its name.

    Args:
        bare: the variables of the hosts that are bare.
    """

    def __init__(
        self, names: Sequence[str], variables: Mapping[str, str], bare: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        bare = bare or {}
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))  # /tmp is each host's own
        self._stack.callback(shutil.rmtree, self._folder)
        switch = Switch()
        self._stack.callback(switch.close)
        self.hosts: dict[str, Host] = {}
        try:
            for name in names:
                own = bare.get(name, variables)
                host = self.hosts[name] = Host(name, self._folder / name, switch, own, bare=name in bare)
                self._stack.callback(host.kill)
                host.boot()
            self._acquaint()
        except BaseException:
            self._stack.close()
            raise

    def _acquaint(self) -> None:
        """One user key for all, everybody's host key known to all, names instead of addresses."""
        key = self._folder / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        config = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts.values())
        known = "".join(
            f"{host.address} {(self._folder / host.name / 'host_key.pub').read_text()}" for host in self.hosts.values()
        )
        for host in self.hosts.values():
            ssh = host.home / ".ssh"
            shutil.copy(key, ssh / "id_ed25519")
            shutil.copy(key.with_suffix(".pub"), ssh / "authorized_keys")
            (ssh / "config").write_text(config)
            (ssh / "known_hosts").write_text(known)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @contextmanager
    def cable(self, one: str, here: str, other: str, there: str) -> Iterator[None]:
        """A direct link between two hosts: interface `here` of `one`, `there` of `other`, without addresses."""
        pids = self[one].pid, self[other].pid
        inside = [["nsenter", "--target", str(pid), "--net", "ip", "link"] for pid in pids]
        add = ["add", "name", here, "type", "veth", "peer", "name", there, "netns", str(pids[1])]
        subprocess.run([*inside[0], *add], check=True)
        for base, name in zip(inside, (here, there), strict=True):
            subprocess.run([*base, "set", "dev", name, "up"], check=True)
        deadline = time.monotonic() + WAIT_S
        for base, name in zip(inside, (here, there), strict=True):  # the kernel says so a little later
            while (
                " state UP " not in subprocess.run([*base, "show", "dev", name], capture_output=True, text=True).stdout
            ):
                assert time.monotonic() < deadline, f"{name} does not come up"
                time.sleep(0.02)
        try:
            yield
        finally:
            subprocess.run([*inside[0], "del", "dev", here], check=False)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def rig(
    names: Sequence[str], variables: Mapping[str, str], bare: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Rig]:
    made = Rig(names, variables, bare)
    try:
        yield made
    finally:
        made.close()
