"""Commands in environments as people have them: each starts, or ends with one line that says what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

PHALANX = str(Path(sys.executable).with_name("phalanx"))
START_S = 240.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Environment(NamedTuple):
    """How a command's surroundings differ from the tests'."""

    variables: Mapping[str, str | None] = {}  # None: not set
    shell: str = ""  # run by a shell before the command
    directory: str = ""  # the current one
    reader_leaves: bool = False  # whoever reads stdout closes it at once


LONG = "l" * 120
SHADOWS = ("types", "random", "phalanx", "msgspec", "mlx_lm", "signal")  # modules that a directory may hold
ENVIRONMENTS = {
    "no HOME": Environment({"HOME": None}),
    "HOME is no directory": Environment({"HOME": "/dev/null"}),
    "ascii locale": Environment(
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ),
    "closed streams": Environment(shell="exec <&- >&- 2>&-"),
    "full streams": Environment(shell="exec >/dev/full 2>/dev/full"),
    "a reader that leaves": Environment(reader_leaves=True),
    "TMPDIR that is missing": Environment({"TMPDIR": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}),
    "TMPDIR that is a file": Environment({"TMPDIR": "/etc/passwd"}),
    "TMPDIR with a long path": Environment({"TMPDIR": LONG}),
    "TMPDIR with odd characters": Environment({"TMPDIR": "tmp ünï"}),
    "a directory that is gone": Environment(shell='mkdir gone && cd gone && rmdir "$PWD"'),
    "a directory of modules": Environment(directory="here"),
    "few open files": Environment(shell="ulimit -n 256"),
    "left-over variables": Environment(
        {"MLX_RANK": "1", "MLX_HOSTFILE": "/nonexistent", "OMPI_COMM_WORLD_RANK": "x", "PMIX_RANK": "3"}
    ),
    "no hub": Environment({"HF_HOME": "/dev/null/x", "HF_HUB_OFFLINE": "maybe", "HF_ENDPOINT": "ht!tp://"}),
    "an odd terminal": Environment({"TERM": "nonsense", "COLUMNS": "x", "LINES": "y"}),
}


TOGETHER = [
    ("no HOME", "ascii locale", "TMPDIR that is missing", "few open files"),
    ("HOME is no directory", "a reader that leaves", "TMPDIR that is a file", "left-over variables"),
    ("closed streams", "TMPDIR with odd characters"),
    ("full streams", "a directory that is gone", "TMPDIR with a long path"),
    ("a directory of modules", "no hub", "an odd terminal"),
]
"""Every environment, with others that hide nothing of what it does."""


def together(*names: str) -> Environment:
    """All of these at once."""
    several = [ENVIRONMENTS[name] for name in names]
    return Environment(
        variables={name: value for one in several for name, value in one.variables.items()},
        shell="; ".join(one.shell for one in several if one.shell),
        directory="".join(one.directory for one in several),
        reader_leaves=any(one.reader_leaves for one in several),
    )


@contextmanager
def started(environment: Environment, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in an environment, in a group of its own; killed at the end. Its output is in `folder`/output."""
    for name in (LONG, "tmp ünï", "here"):
        (folder / name).mkdir()
    for name in SHADOWS:
        (folder / "here" / f"{name}.py").write_text(f'raise SystemExit("{name} of the current directory")\n')
    variables: dict[str, Any] = dict(os.environ)
    for name, value in environment.variables.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = str(folder / value) if (folder / value).is_dir() else value
    command = [PHALANX, *arguments]
    if environment.shell:
        command = ["/bin/sh", "-c", f'{environment.shell}; exec "$@"', "sh", *command]
    with (folder / "output").open("wb") as output:
        stdout: Any = subprocess.PIPE if environment.reader_leaves else output
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=output, env=variables, start_new_session=True,
            cwd=folder / environment.directory,
        )  # fmt: skip
        if process.stdout is not None:
            process.stdout.close()
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def served_port(process: subprocess.Popen[bytes]) -> int:
    """The port on which the server answers a chat."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = [connection.laddr.port for connection in psutil.Process(process.pid).net_connections("tcp4")
                 if connection.status == psutil.CONN_LISTEN]  # fmt: skip
        for port in found:
            try:
                if answer(port):
                    return port
            except OSError:  # it does not serve yet
                pass
        time.sleep(0.1)
    raise AssertionError(f"no answer; the process ended with {process.poll()}")


def answer(port: int) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(CHAT).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def test_every_environment_is_tried() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(ENVIRONMENTS)


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_serving_works_anywhere(names: tuple[str, ...], tmp_path: Path) -> None:
    check_serving(together(*names), [], tmp_path)


@pytest.mark.soak  # which of those that were tried together it was
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_serving_works_in_each_environment(name: str, tmp_path: Path) -> None:
    check_serving(ENVIRONMENTS[name], [], tmp_path)


@pytest.mark.full
def test_two_ranks_work_anywhere(tmp_path: Path) -> None:
    """All that mpirun and its ranks could mind, at once."""
    names = ("no HOME", "left-over variables", "TMPDIR that is missing", "closed streams", "a directory of modules")
    environment = together(*names)
    check_serving(environment, ["--tp", "2", "--heartbeat-timeout-seconds", "8"], tmp_path)


def check_serving(environment: Environment, flags: list[str], folder: Path) -> None:
    with started(environment, ["serve", "demo", "--port", "0", *flags], folder) as process:
        served_port(process)
        process.terminate()
        assert process.wait(START_S) == 0
    assert "Traceback" not in (folder / "output").read_text(errors="replace")


CHAT_COMMAND = (["chat", "demo"], 0, "/quit")
DOCTOR = (["doctor", "--hosts", "nobody@127.0.0.1:1"], 20, "nobody")
UP = (["up", "--hosts", "nobody@127.0.0.1:1", "--skip-checks"], 1, "nobody")


@pytest.mark.parametrize(
    ("names", "command", "code", "said"),
    [
        (("ascii locale", "a directory of modules"), *CHAT_COMMAND),
        (("ascii locale", "no HOME"), *DOCTOR),
        (("TMPDIR that is missing", "a directory of modules"), *UP),
    ],
)
def test_other_commands_end_with_a_line(
    names: tuple[str, ...], command: list[str], code: int, said: str, tmp_path: Path
) -> None:
    with started(together(*names), command, tmp_path) as process:
        assert process.wait(START_S) == code
    output = (tmp_path / "output").read_text(errors="replace")
    assert said in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [
        pytest.param(Environment(shell="exec >/dev/full"), 1, "error: stdout cannot be written", id="full stdout"),
        pytest.param(Environment(reader_leaves=True), 1, "", id="a reader that leaves"),
    ],
)
def test_an_answer_that_cannot_be_written(environment: Environment, code: int, said: str, tmp_path: Path) -> None:
    with started(environment, ["generate", "demo", "--prompt", "hi", "--max-tokens", "3"], tmp_path) as process:
        assert process.wait(START_S) == code
    output = (tmp_path / "output").read_text()
    assert said in output
    assert "Traceback" not in output and "Exception ignored" not in output


def test_an_argument_that_is_not_utf8(tmp_path: Path) -> None:
    done = subprocess.run([PHALANX, "generate", "--prompt", b"caf\xe9"], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr == b"error: the argument 'caf\\udce9' is not UTF-8.\n"
