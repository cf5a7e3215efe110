"""`phalanx install`: which wheels a platform gets, how a host without phalanx is asked, how releases are switched."""

from __future__ import annotations

import asyncio
import ensurepip
import fcntl
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx import __version__
from phalanx.catalog import package_index
from phalanx.cli.install import names_of
from phalanx.cli.main import main
from phalanx.cluster import install_lock, installer, wheelhouse
from phalanx.cluster.host_platform import HostPlatform, applying, fits, platforms
from phalanx.cluster.installer import BareHost, Installer
from phalanx.cluster.releases import LISTED, InstallFolder, ReleaseRequest, Releases
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import RunDirectory
from phalanx.cluster.wheelhouse import fetch, kernel_pythons, wheels_for
from phalanx.errors import ClusterError, ConfigError
from phalanx.planning.calibration_store import CalibrationStore

LINUX = HostPlatform(python=(3, 12, 4), system="Linux", machine="x86_64", libc=(2, 36), mlx="cpu")
MAC = HostPlatform(python=(3, 13, 0), system="Darwin", machine="arm64", macos=(26, 2), mlx="metal")
LOCK = """# a head
numpy==2.4.6 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
mlx==0.32.4 ; sys_platform == 'darwin' \\
    --hash=sha256:cc
tomli==2.0.0 ; python_version < '3.13' \\
    --hash=sha256:dd
"""


# Platforms ---------------------------------------------------------------------------------------------------------


def test_the_conditions_of_a_lock_are_the_hosts_own():
    """Whatever this machine is. pip is told no conditions: it would take them for this machine's."""
    numpy = "numpy==2.4.6 --hash=sha256:aa --hash=sha256:bb"
    assert applying([LOCK], LINUX) == [numpy, "tomli==2.0.0 --hash=sha256:dd"]
    assert applying([LOCK], MAC) == [numpy, "mlx==0.32.4 --hash=sha256:cc"]


@pytest.mark.parametrize(
    ("wheel", "host", "runs"),
    [
        ("phalanx_cpu-0.1.0-1234-cp312-cp312-manylinux_2_35_x86_64.whl", LINUX, True),
        ("phalanx_cpu-0.1.0-cp311-cp311-manylinux_2_35_x86_64.whl", LINUX, False),
        ("phalanx_cpu-0.1.0-cp312-cp312-manylinux_2_37_x86_64.whl", LINUX, False),
        ("phalanx_cpu-0.1.0-cp312-cp312-manylinux_2_35_aarch64.whl", LINUX, False),
        ("psutil-7.2.2-cp36-abi3-manylinux2014_x86_64.whl", LINUX, True),
        ("psutil-7.2.2-cp36-abi3-macosx_11_0_arm64.whl", MAC, True),
        ("psutil-7.2.2-cp36-abi3-macosx_27_0_arm64.whl", MAC, False),
        ("phalanx-0.1.0-py3-none-any.whl", MAC, True),
    ],
)
def test_which_wheels_run_where(wheel, host, runs):
    assert fits(wheel, host) is runs


@pytest.mark.parametrize("changes", [{"system": "FreeBSD", "libc": None}, {"libc": None}])  # the second: musl
def test_a_system_that_phalanx_does_not_know_is_named(changes):
    with pytest.raises(ClusterError, match=r"phalanx does not run on .*\. It runs on macOS and on Linux with glibc\."):
        platforms(msgspec.structs.replace(LINUX, **changes))


@pytest.mark.parametrize(
    "lie",
    [
        {"machine": "$(reboot)"}, {"machine": "../../x"}, {"system": "a;b"}, {"current": "a b"}, {"mlx": "rm"},
        {"python": [3, 12, -1]}, {"python": [3, 12]}, {"libc": [2, 10**9]}, {"current": "x" * 65},
    ],
    ids=str,
)  # fmt: skip
def test_a_host_that_lies_about_itself_is_refused(lie):
    with pytest.raises(ClusterError, match="liar answers in another way"):
        asyncio.run(Liar({**msgspec.to_builtins(LINUX), **lie}).call("facts", {}, HostPlatform))


def hashed(*names: str) -> str:
    """A lock."""
    return "".join(f"{name}==1 \\\n    --hash=sha256:{hash_of(name)}\n" for name in names)


def hash_of(text: str) -> str:
    return wheelhouse.digest(io.BytesIO(text.encode()))


# The wheelhouse ----------------------------------------------------------------------------------------------------


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """What `make wheels` writes, for one Python."""
    folder = tmp_path / "dist"
    folder.mkdir()
    wheel(folder / f"phalanx-{__version__}-py3-none-any.whl", "phalanx/errors.py", "phalanx/demo/model/weights")
    wheel(folder / f"phalanx_cpu-{__version__}-77-cp312-cp312-manylinux_2_35_x86_64.whl", "phalanx_cpu/ops.so")
    texts = {"requirements.lock": LOCK, "requirements-cpu.lock": "", "requirements-dev.lock": "", "mlx_backend.sh": ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def wheel(file: Path, *names: str) -> Path:
    with zipfile.ZipFile(file, "w") as made:
        for name in names:
            made.writestr(name, name)
    return file


def test_a_platform_gets_its_kernels_or_a_word_on_what_it_loses(dist):
    found = wheels_for(LINUX, dist)
    assert [file.name.split("-")[0] for file in found.own] == ["phalanx", "phalanx_cpu"] and not found.lost
    assert kernel_pythons(dist)[0] == "3.12"
    other = wheels_for(msgspec.structs.replace(LINUX, python=(3, 14, 0)), dist)
    assert len(other.own) == 1 and "no native kernels for Python 3.14 on x86_64" in other.lost
    assert not wheels_for(MAC, dist).lost


def test_of_the_locks_a_host_gets_what_the_engine_imports_and_no_tools(dist):
    (dist / "requirements-dev.lock").write_text(hashed("mypy", "transformers"))
    assert [one.split("==")[0] for one in wheels_for(LINUX, dist).locked] == ["numpy", "tomli", "transformers"]


@pytest.mark.parametrize(
    "name",
    [f"phalanx-{__version__}-py3-none-any.whl", "requirements-cpu.lock", "requirements-dev.lock", "mlx_backend.sh"],
)
def test_a_folder_that_lacks_something_is_named(dist, name, capsys):
    (dist / name).unlink()
    with pytest.raises(ConfigError, match="make wheels") as failed:
        wheels_for(LINUX, dist)
        wheelhouse.backend_script(dist)
    assert str(dist) in failed.value.message
    if name.startswith("phalanx"):  # before any host is asked
        assert main(["install", "nowhere", "--wheels", str(dist)]) == 64
        assert "has no wheel of phalanx" in capsys.readouterr().err


def test_a_release_is_named_after_all_that_is_in_it(dist):
    before = wheels_for(LINUX, dist).release
    assert before == wheels_for(LINUX, dist).release and before.startswith(f"{__version__}-")
    wheel(dist / f"phalanx-{__version__}-py3-none-any.whl", "phalanx/newer.py")
    newer = wheels_for(LINUX, dist).release
    (dist / "requirements-cpu.lock").write_text("mlx==0.33.0 \\\n    --hash=sha256:ee\n")
    assert len({before, newer, wheels_for(LINUX, dist).release}) == 3


class Pip:
    """pip in `wheelhouse`: puts wheels with the contents `a` and `d` where it was told, or fails."""

    def __init__(self, says: str = "") -> None:
        self.asked: list[str] = []
        self.command: list[str] = []
        self._says = says

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.command = command
        self.asked += [line.split("==")[0] for line in Path(command[command.index("-r") + 1]).read_text().splitlines()]
        if not self._says:
            for name in self.asked:
                (Path(command[command.index("--dest") + 1]) / f"{name}-1-py3-none-any.whl").write_bytes(name.encode())
        return subprocess.CompletedProcess(command, bool(self._says), "", self._says)


def test_wheels_are_fetched_once(dist, monkeypatch):
    pip = Pip()
    monkeypatch.setattr(package_index.subprocess, "run", pip)
    (dist / "requirements.lock").write_text(hashed("msgspec", "psutil"))
    wanted = wheels_for(LINUX, dist)
    fetch(wanted)
    assert pip.asked == ["msgspec", "psutil"] and "--require-hashes" in pip.command
    first = (wanted.sent / "locked.zip").read_bytes()
    assert sorted(file.name for file in wanted.sent.iterdir()) == sorted(
        ["locked.zip", LISTED, *(file.name for file in wanted.own)]
    )
    (dist / "requirements.lock").write_text(hashed("msgspec", "psutil", "rich"))
    fetch(wheels_for(LINUX, dist))
    fetch(wheels_for(LINUX, dist))
    assert pip.asked == ["msgspec", "psutil", "rich"]
    (dist / "requirements.lock").write_text(hashed("msgspec", "psutil"))
    fetch(wheels_for(LINUX, dist))
    assert (wanted.sent / "locked.zip").read_bytes() == first  # so a host that has it is sent nothing
    assert [file.name for file in wanted.seed] == [wanted.own[0].name, "msgspec-1-py3-none-any.whl",
                                                   "psutil-1-py3-none-any.whl"]  # fmt: skip


def test_a_wheel_that_pip_cannot_fetch_is_named(dist, monkeypatch):
    monkeypatch.setattr(
        package_index.subprocess, "run", Pip("WARNING: a\nERROR: No matching distribution found for mlx\n")
    )
    with pytest.raises(ClusterError, match=r"cp312-glibc2\.36-x86_64-cpu cannot be fetched: No matching .* for mlx"):
        fetch(wheels_for(LINUX, dist))


def test_two_commands_fetch_the_same_wheels_after_each_other(dist, monkeypatch):
    (dist / "requirements.lock").write_text(hashed("msgspec", "psutil"))
    wanted, pip, fetching = wheels_for(LINUX, dist), Pip(), []

    def slow(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        if not fetching:
            fetching.append(threading.Thread(target=fetch, args=(wanted,)))
            fetching[0].start()
        with pytest.raises(BlockingIOError), (wanted.folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return pip(command, **settings)

    monkeypatch.setattr(package_index.subprocess, "run", slow)
    fetch(wanted)
    fetching[0].join()
    assert pip.asked == ["msgspec", "psutil"] and (wanted.sent / LISTED).exists()


def test_a_folder_that_cannot_be_written_is_named(dist):
    (dist / "hosts").write_text("a file")
    with pytest.raises(ClusterError, match=r"hosts/.* cannot be written"):
        fetch(wheels_for(LINUX, dist))


def test_an_index_that_cannot_be_reached_is_one_line_and_is_tried_twice(dist, monkeypatch):
    """With a real pip: its own word is that there is no matching distribution."""
    for name in ("PIP_RETRIES", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "*")
    ran, run = [], subprocess.run

    def recorded(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        ran.append(run(command, **settings))
        return ran[-1]

    monkeypatch.setattr(package_index.subprocess, "run", recorded)
    with pytest.raises(ClusterError) as failed:
        fetch(wheels_for(LINUX, dist))
    said = failed.value.message
    assert "cannot be fetched: the package index cannot be reached: Failed to establish a new connection" in said
    assert said.endswith("Connection refused.") and "it goes on" in failed.value.remedy
    assert ran[0].stderr.count("WARNING: Retrying") == 1


# A host without phalanx --------------------------------------------------------------------------------------------


class Liar(Remote):
    def __init__(self, facts: object) -> None:
        super().__init__("liar")
        self._facts = facts

    def command(self, *words: str, agent: bool = False) -> list[str]:
        return [sys.executable, "-c", f"print({'phalanx-answer:' + json.dumps(self._facts)!r})"]


def at_home(folder: Path, host: BareHost, verb: str, **stand_ins: str) -> subprocess.CompletedProcess[str]:
    """Run a host's command here, with this Python as the only one but for stand-ins."""
    script = host.command("host", verb)[-1]
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in [f"python3.{minor}" for minor in range(11, 15)] + ["python3", "uv"]:
        (programs / name).write_text(f"#!/bin/sh\n{stand_ins.get(name.replace('.', '_'), 'exit 127')}\n")
        (programs / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", "-c", script], env={"HOME": str(folder), "PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True, text=True, input="{}", check=False,
    )  # fmt: skip


REAL = f'exec {sys.executable} "$@"'
OLD = """case "$2" in *version_info*) exit 1 ;; *) echo 'Python 3.9.18' ;; esac"""


def test_the_facts_are_those_of_the_python_that_is_found(tmp_path):
    done = at_home(tmp_path, BareHost("b", ["3.12"], "echo cuda13"), "facts", python3_12=REAL)
    facts = msgspec.json.decode(done.stdout.removeprefix("phalanx-answer:"), type=HostPlatform)
    assert facts.python == sys.version_info[:3] and facts.mlx == "cuda13" and facts.current == ""


@pytest.mark.parametrize(("programs", "has"), [({"python3": OLD}, "Python 3.9.18"), ({}, "no Python")])
def test_a_host_without_a_fitting_python_says_what_it_has(tmp_path, programs, has):
    done = at_home(tmp_path, BareHost("b", ["3.12"]), "facts", **programs)
    said = installer.failure("b", done.returncode, done.stderr, doing="x")
    assert said.message == f"b: It has {has}; phalanx needs Python 3.11 or newer." and "apt install" in said.remedy


def test_uv_brings_a_python_below_phalanxs_own_folder(tmp_path):
    place = "$UV_PYTHON_INSTALL_DIR/cpython-3.12/bin"
    uv = f"""mkdir -p {place}; printf '#!/bin/sh\\n{REAL}\\n' >{place}/python3; chmod 755 {place}/python3"""
    done = at_home(tmp_path, BareHost("b", ["3.12"]), "facts", python3=OLD, uv=uv)
    assert done.stdout.startswith("phalanx-answer:"), done.stderr
    assert (tmp_path / ".phalanx/python/cpython-3.12/bin/python3").exists()


def test_a_host_where_nothing_was_installed_says_so(tmp_path):
    done = at_home(tmp_path, BareHost("b", ["3.12"]), "rollback", python3_12=REAL)
    assert done.stdout == "phalanx-answer:{}\n"


def test_the_seed_receives_files_and_has_no_model(tmp_path, dist):
    """The seed here is phalanx's source; msgspec and psutil are this Python's own."""
    source = Path(installer.__file__).parents[2]
    names = [str(file.relative_to(source)) for file in (source / "phalanx").rglob("*.py")]
    with zipfile.ZipFile(dist / "seed.whl", "w") as made:
        for name in [*names, "phalanx/demo/model/MODEL_CARD.md"]:
            made.write(source / name, name)
    host = BareHost("localhost", ["3.12"])
    packed = zipfile.ZipFile(io.BytesIO(installer._packed([dist / "seed.whl"])))
    assert set(packed.namelist()) == set(names)
    packed.extractall(tmp_path / installer.SEED)
    done = at_home(tmp_path, host, "inventory", python3_12=REAL)
    assert done.returncode == 1 and "error: The question is not Manifest" in done.stderr


# Commands that run phalanx on a host -------------------------------------------------------------------------------


def test_the_installed_release_comes_before_a_python_of_the_same_path(tmp_path):
    def ran(python: str = "") -> str:
        (script,) = Remote("b", python=python).command("host", "status")[-1:]
        env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SHELL": "/bin/sh"}
        return subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True, input="").stdout

    for name in ("releases/1/bin", "other"):
        program = tmp_path / ".phalanx" / name / "python"
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\necho "$0" "$@"\n')
        program.chmod(0o755)
    assert "phalanx-answer" in ran()  # this Python, which is there
    (tmp_path / ".phalanx/venv").symlink_to("releases/1")
    assert ran() == f"{tmp_path}/.phalanx/releases/1/bin/python -P -m phalanx host status\n"
    assert ran(str(program)) == f"{program} -P -m phalanx host status\n"


# Releases ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> InstallFolder:
    """A host's, in which releases are made of nothing."""
    made = InstallFolder(tmp_path)
    made.wheels.mkdir(parents=True)

    def make(release: Path) -> None:
        (release / "bin").mkdir(parents=True)
        (release / "bin/python").symlink_to(sys.executable)
        (release / "complete").touch()

    monkeypatch.setattr(made, "_make", make)
    return made


def request(name: str) -> ReleaseRequest:
    return ReleaseRequest(name=name, files=["kept.whl"])


def test_releases_are_switched_and_switched_back(folder):
    assert folder.install(request("1")) == Releases(current="1")
    assert (folder.current / "complete").exists()
    assert folder.install(request("2")) == Releases(current="2", previous="1")
    assert folder.rollback() == Releases(current="1", previous="2")
    assert folder.rollback() == Releases(current="2", previous="1")
    (folder.wheels / "old.whl").touch()
    (folder.wheels / "kept.whl").touch()
    assert folder.install(request("3")) == Releases(current="3", previous="2")
    assert sorted(path.name for path in folder.releases.iterdir()) == ["2", "3"]
    assert [path.name for path in folder.wheels.iterdir()] == ["kept.whl"]


def test_a_release_that_runs_is_not_deleted(folder):
    folder.install(request("1"))
    python = folder.releases / "1/bin/python"
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as running:
        for name in "234":
            folder.install(request(name))
        assert python.exists()
        running.communicate(b"\n")
    folder.install(request("5"))
    assert not python.exists()


def test_a_release_that_was_interrupted_is_made_again(folder):
    half = folder.releases / "1"
    half.mkdir(parents=True)
    (half / "rubbish").touch()
    folder.install(request("1"))
    assert not (half / "rubbish").exists() and (half / "complete").exists()


def test_a_release_whose_python_went_away_is_made_again(folder):
    folder.install(request("1"))
    python = folder.releases / "1/bin/python"
    python.unlink()
    python.symlink_to("/no/such/python")
    folder.install(request("1"))
    assert python.exists()


def test_a_release_that_cannot_be_made_changes_nothing(folder, monkeypatch):
    folder.install(request("1"))
    monkeypatch.undo()
    with pytest.raises(ClusterError, match=r"locked\.zip cannot be written: No such file"):
        folder.install(request("2"))
    assert folder.names() == Releases(current="1")
    with zipfile.ZipFile(folder.wheels / "locked.zip", "w") as packed:
        packed.writestr("pip-1-py3-none-any.whl", "no zip")
    with pytest.raises(ClusterError, match="pip failed on"):
        folder.install(request("2"))
    assert folder.names() == Releases(current="1")


@pytest.mark.parametrize(
    ("lock", "says"),
    [
        ("other==1 --hash=sha256:{wrong}", "pip failed on .*Expected sha256"),
        ("other==1", "pip failed on .*hash"),
        ("other==1 --hash=sha256:{right}", "the new phalanx failed on "),
    ],
)
def test_pip_takes_no_file_but_those_of_the_lock(tmp_path, lock, says):
    """With the right hash it is installed, and is no phalanx that runs."""
    host = InstallFolder(tmp_path)
    host.wheels.mkdir(parents=True)
    pip = next((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"), None)
    if pip is None:
        pytest.skip("this Python brings no pip")
    name = "other-1-py3-none-any.whl"
    meta = {
        "METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
        "RECORD": "",
        "WHEEL": "Wheel-Version: 1.0\n",
    }
    with zipfile.ZipFile(tmp_path / name, "w") as made:
        for file, text in meta.items():
            made.writestr(f"other-1.dist-info/{file}", text)
    with zipfile.ZipFile(host.wheels / "locked.zip", "w") as packed:
        for file in (pip, tmp_path / name):
            packed.write(file, file.name)
    right = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    (host.wheels / LISTED).write_text(lock.format(right=right, wrong="0" * 64))
    with pytest.raises(ClusterError, match=says):
        host.install(request("1"))
    assert host.names() == Releases() and not (host.releases / "1/complete").exists()


def test_one_command_at_a_time_installs_on_a_host(tmp_path, monkeypatch):
    """The lock that a command on another machine holds ends with that command's connection."""
    script = BareHost("b", ["3.12"]).command("host", "lock")[-1]
    (tmp_path / "python3").symlink_to(sys.executable)
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = shlex.split(script)[-1:]  # what ssh hands to sh
    holding = subprocess.Popen(
        ["/bin/sh", "-c", *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holding.stdin is not None and holding.stdout is not None
    host = InstallFolder(tmp_path)
    with holding.stdin, holding.stdout:
        holding.stdin.write('{"holder": "ann@desk, process 5"}\n')
        holding.stdin.flush()
        assert holding.stdout.readline() == "phalanx-answer:{}\n"
        monkeypatch.setattr(install_lock, "WAIT_S", 0.0)
        for change in (host.rollback, host.remove):
            with pytest.raises(
                ClusterError, match=r"Another command installs here: ann@desk, process 5, since [\d:]+, "
            ):
                change()
        second = subprocess.run(
            ["/bin/sh", "-c", *words], env=env, input='{"holder": "bob"}\n', capture_output=True, text=True
        )
        said = installer.failure("b", second.returncode, second.stderr, doing="x")
        assert said.message.startswith("b: Another command installs here: ann@desk, process 5, since ")
        assert said.remedy == "Wait for its end, then run the same command again."
    holding.wait()
    assert host.remove() == Releases() and not (tmp_path / ".phalanx").exists()


def test_there_is_nothing_to_switch_back_to(folder):
    folder.install(request("1"))
    with pytest.raises(ClusterError, match="There is no earlier release here"):
        folder.rollback()


def test_names_that_lead_elsewhere_are_refused():
    for name in ("../x", "", ".x", "a/b"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps({"name": name, "files": []}), type=ReleaseRequest)


def test_uninstall_deletes_all_but_logs_and_nothing_that_runs(folder, monkeypatch):
    folder.install(request("1"))
    (folder.root / "logs").mkdir()
    CalibrationStore(folder.root, ("a machine",)).put(("steps",), 1.0)
    assert len(list(folder.root.glob("*.json"))) == 1
    monkeypatch.setattr(RunDirectory, "running", lambda self: ["a process"])
    with pytest.raises(ClusterError, match="A cluster runs here"):
        folder.remove()
    monkeypatch.setattr(RunDirectory, "running", lambda self: [])
    assert folder.remove() == Releases(current="1")
    assert [path.name for path in folder.root.iterdir()] == ["logs"]
    assert folder.remove() == Releases()


# The command -------------------------------------------------------------------------------------------------------


def test_hosts_are_names_or_a_file(tmp_path, monkeypatch):
    (tmp_path / "hosts.json").write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    monkeypatch.chdir(tmp_path)
    assert names_of("a,b", None) == names_of("hosts.json", None) == names_of(None, Path("hosts.json")) == ["a", "b"]
    with pytest.raises(ConfigError, match="Which hosts"):
        names_of(None, None)


def test_flags_that_contradict_each_other(capsys):
    assert main(["install", "a", "--upgrade", "--rollback"]) == 64
    assert "exclude each other" in capsys.readouterr().err


class Answering(BareHost):
    """A host with another release."""

    async def call(self, verb: str, *_: object, **__: object) -> object:
        assert verb == "facts"
        return msgspec.structs.replace(LINUX, current="0.0.1-abc")


def test_another_release_is_left_alone_without_upgrade(dist):
    with pytest.raises(ClusterError, match=r"b: It has phalanx 0\.0\.1-abc; this machine has .*--upgrade"):
        asyncio.run(Installer(dist, lambda *_: None, lambda *_: None).install(Answering("b"), upgrade=False))
