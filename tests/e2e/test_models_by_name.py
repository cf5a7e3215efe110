"""`phalanx pull`, `list`, `show`, `rm`, `ps` and `stop`, against a hub on this machine that fails in every way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from support.gateways import running_gateway
from support.gguf_files import write_tiny
from support.stub_hub import COMMIT, StubHub, files_of_a_model, stub_hub, variables_of

from phalanx.demo import MODEL_DIR
from phalanx.errors import ExitCode

NAME = "owner/tiny"
LIMIT_S = 240.0
WEIGHTS = bytes(range(256)) * (25 << 12)  # 25 MiB: the hub's client writes in pieces of 10 MB

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub({NAME: files_of_a_model()}) as running:
        yield running


@pytest.fixture
def variables(hub: StubHub, tmp_path: Path) -> dict[str, str]:
    return variables_of(hub, tmp_path)


@pytest.fixture
def phalanx(variables: dict[str, str]) -> Run:
    def run(*words: str, shell: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", *words]
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        return subprocess.run(
            command, env={**variables, **settings}, capture_output=True, text=True, timeout=LIMIT_S
        )  # fmt: skip

    return run


def repository(variables: dict[str, str]) -> Path:
    return Path(variables["HF_HOME"]) / "hub" / "models--owner--tiny"


def snapshot(variables: dict[str, str]) -> Path:
    return repository(variables) / "snapshots" / COMMIT


def refused(ended: subprocess.CompletedProcess[str], *said: str, code: int = ExitCode.CONFIG) -> None:
    """One line that says what is wrong, and one that says what to do."""
    assert ended.returncode == code, ended.stderr
    *_, error, remedy = ended.stderr.splitlines()
    assert error.startswith("error: ") and remedy.startswith("  "), ended.stderr
    assert ended.stderr.count("error: ") == 1 and "Traceback" not in ended.stderr
    assert all(text in error for text in said), error
    assert ended.stdout == ""


def test_pull_list_show_rm(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    pulled = phalanx("pull", NAME)
    assert (pulled.returncode, pulled.stdout) == (0, f"{snapshot(variables)}\n"), pulled.stderr
    assert "GiB of disk" in pulled.stderr and ": 100%" in pulled.stderr
    present = {file.name: file.read_bytes() for file in snapshot(variables).iterdir()}
    assert present == {name: data for name, data in hub.repositories[NAME].items() if name != "README.md"}
    ref = repository(variables) / "refs" / "main"
    written = ref.stat().st_mtime_ns
    again = phalanx("pull", NAME)
    assert (again.returncode, again.stdout, again.stderr) == (0, pulled.stdout, "")
    assert len(hub.ranges()) == 2, "nothing was fetched again"
    assert [path for _, path, _ in hub.asked].count(f"/api/models/{NAME}") == 2, "the second pull asked once"
    assert (ref.read_text(), ref.stat().st_mtime_ns) == (COMMIT, written), "nothing is written to a cache that has all"

    (row,) = [line.split() for line in phalanx("list").stdout.splitlines() if line.startswith(NAME)]
    assert row[1:6] == ["0", "MiB", "llama", "4", "4096"] and row[-1] in ("yes", "no")
    assert json.loads(phalanx("list", "--json").stdout)[-1]["repository"] == NAME
    assert str(snapshot(variables)) in phalanx("show", NAME).stdout
    removed = phalanx("rm", NAME)
    assert removed.returncode == 0 and not repository(variables).exists(), removed.stderr
    refused(phalanx("rm", NAME), f"{NAME} is not on this machine")
    refused(phalanx("show", "qwen3:4b"), "qwen3:4b is not on this machine")
    refused(phalanx("rm", "demo"), "was not downloaded")


def test_rm_takes_several_names_and_reports_each(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    hub.repositories["owner/other"] = files_of_a_model()
    for name in (NAME, "owner/other"):
        assert phalanx("pull", name).returncode == 0
    ended = phalanx("rm", NAME, "owner/none", "demo", "owner/other", NAME)
    assert ended.stdout.splitlines() == [f"deleted {name}: 0 MiB" for name in (NAME, "owner/other")]
    errors = [line for line in ended.stderr.splitlines() if not line.startswith("  ")]
    assert errors[0] == "error: owner/none is not on this machine."
    assert errors[1].startswith("error: demo was not downloaded") and len(errors) == 2
    assert ended.returncode == ExitCode.CONFIG and not repository(variables).exists()
    lines = phalanx("rm", NAME, "demo", "--json").stdout.splitlines()
    assert ["error" in json.loads(line) for line in lines] == [True, True]


def test_pull_tells_programs_what_ollamas_api_tells(phalanx: Run, hub: StubHub) -> None:
    lines = [json.loads(line) for line in phalanx("pull", NAME, "--json").stdout.splitlines()]
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
    files = {line["digest"]: line for line in lines if "digest" in line}
    assert {line["total"] for line in files.values()} == {len(b"weights"), len(b"{}")}
    assert all(line["completed"] == line["total"] for line in files.values()), "the last of each file"
    assert all(line["status"] == f"pulling {digest.removeprefix('sha256:')[:12]}" for digest, line in files.items())
    assert {"status": "verifying sha256 digest"} in lines
    failed = phalanx("pull", "owner/none", "--json")
    assert (
        failed.returncode == ExitCode.CONFIG
        and "no such repository" in json.loads(failed.stdout.splitlines()[-1])["error"]
    )
    assert failed.stderr == ""


def test_the_token_goes_to_the_hub_and_nowhere_else(phalanx: Run, hub: StubHub) -> None:
    hub.token = "hf_secret"
    refused(phalanx("pull", NAME), "no such repository (or it is private)")
    refused(phalanx("pull", NAME, HF_TOKEN="hf_wrong"), "does not accept this machine's token")
    assert phalanx("pull", NAME, HF_TOKEN="hf_secret").returncode == 0
    assert not hub.leaked


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("owner/none", {}, "the hub has no such repository"),
        ("no such name", {}, "not a hub id"),
        ("./nothing", {}, "No such directory"),
        ("~no-such-user/x", {}, "is not a path"),
        (300 * "a", {}, "is not a path: File name too long"),
        (NAME, {"HF_ENDPOINT": "ht!tp://"}, "HF_ENDPOINT is 'ht!tp://', which is not a URL"),
        (NAME, {"HF_ENDPOINT": "hub.example"}, "is not a URL"),
        (NAME, {"HF_ENDPOINT": "http://[::1"}, "is not a URL"),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
        (NAME, {"HF_HOME": "/dev/null/x"}, "could not be fetched"),
    ],
)
def test_what_cannot_be_pulled_is_one_line(name: str, settings: dict[str, str], said: str, phalanx: Run) -> None:
    refused(phalanx("pull", name, **settings), said)


def test_a_revision_that_does_not_exist(phalanx: Run) -> None:
    refused(phalanx("pull", NAME, "--revision", "v9"), "has no revision 'v9'")


def test_a_repository_without_weights_that_can_be_read(phalanx: Run, hub: StubHub) -> None:
    del hub.repositories[NAME]["model.safetensors"]
    refused(phalanx("pull", NAME), "has no weights as safetensors")


def test_a_cache_copied_by_hand_serves_without_the_hub(phalanx: Run, variables: dict[str, str]) -> None:
    phalanx("pull", NAME)
    ref = repository(variables) / "refs" / "main"
    found = f"{snapshot(variables)}\n"
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        ref.write_text(f"{COMMIT}\n")
        assert phalanx("pull", NAME, **settings).stdout == found
        ref.unlink()
        assert phalanx("pull", NAME, **settings).stdout == found
    (snapshot(variables) / "model.safetensors").unlink()
    refused(phalanx("pull", NAME, HF_HUB_OFFLINE="1"), "is incomplete", "lacks model.safetensors")
    refused(phalanx("serve", NAME, "--port", "0", HF_HUB_OFFLINE="1"), "is incomplete", "lacks model.safetensors")
    assert "not whole: phalanx pull owner/tiny" in phalanx("list").stdout


def test_a_killed_pull_leaves_nothing_to_serve_and_the_next_goes_on(
    phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    hub.repositories[NAME]["model.safetensors"] = WEIGHTS
    hub.stops_at = 21 << 20
    pulling = subprocess.Popen([sys.executable, "-m", "phalanx", "pull", NAME], env=variables, stderr=subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    parts: list[Path] = []
    while not any(part.stat().st_size >= 10_000_000 for part in parts) and time.monotonic() < deadline:
        time.sleep(0.05)
        parts = list((repository(variables) / "blobs").glob("*.part"))
    pulling.send_signal(signal.SIGKILL)
    pulling.communicate()
    (part,) = parts
    have = part.stat().st_size
    assert 10_000_000 <= have < len(WEIGHTS) and not snapshot(variables).exists()
    refused(phalanx("serve", NAME, "--port", "0", HF_HUB_OFFLINE="1"), "the hub cannot be reached")
    assert "not whole: phalanx pull owner/tiny" in phalanx("list").stdout

    hub.stops_at = None
    hub.go_on.set()
    assert phalanx("pull", NAME).returncode == 0
    assert hub.ranges()[-1] == f"bytes={have}-"
    assert (snapshot(variables) / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(repository(variables).rglob("*.part"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_changes_while_it_is_read_gets_no_name(
    name: str, phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    whole = hub.repositories[NAME][name]
    hub.sends[name] = bytes(len(whole))
    refused(phalanx("pull", NAME), f"{name} of {NAME} is not what the hub says")
    assert not (snapshot(variables) / name).exists()
    refused(phalanx("pull", NAME, HF_HUB_OFFLINE="1"), "neither a directory nor in the hub's cache")
    hub.sends[name] = whole[:-1]  # and of another size
    ended = phalanx("pull", NAME)
    assert ended.returncode == ExitCode.CONFIG and "error: " in ended.stderr and "Traceback" not in ended.stderr
    assert not (snapshot(variables) / name).exists()
    hub.sends.clear()
    assert phalanx("pull", NAME).returncode == 0
    assert (snapshot(variables) / name).read_bytes() == whole


@pytest.mark.parametrize("tag", ["../../../../stray", "{outside}/stray"])
def test_no_header_of_the_hub_decides_where_a_file_lies(
    tag: str, phalanx: Run, variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    hub.etags["config.json"] = tag.format(outside=tmp_path)
    assert phalanx("pull", NAME).returncode == 0
    assert not list(tmp_path.rglob("stray*"))
    present = {file.name: file.read_bytes() for file in snapshot(variables).iterdir()}
    assert present["config.json"] == hub.repositories[NAME]["config.json"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sha": "../../../../stray"}, "the commit ../../../../stray"),
        ({"sha": None}, "the commit None"),
        ({"blobId": "../../../../stray"}, "the checksum ../../../../stray"),
        ({"lfs": {"sha256": "/tmp/stray", "size": 7, "pointerSize": 1}}, "the checksum /tmp/stray"),
        ({"rfilename": "../../../../stray.json"}, "the file ../../../../stray.json"),
        ({"rfilename": "/stray.json"}, "the file /stray.json"),
        ({"rfilename": 5}, "the file 5"),
        ({"size": -1}, "with -1 bytes"),
        ({"size": None}, "with None bytes"),
        ({"siblings": None}, "has no weights as safetensors"),
        ({"siblings": 5}, "could not be fetched from the hub"),
    ],
)
def test_a_list_of_the_hub_with_what_becomes_no_path_is_refused(
    wrong: dict[str, object], said: str, phalanx: Run, variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    hub.lies = wrong
    victim = tmp_path / "stray.part"
    victim.write_text("precious")
    refused(phalanx("pull", NAME), said)
    assert victim.read_text() == "precious" and list(tmp_path.rglob("stray*")) == [victim]
    assert not list(repository(variables).rglob("*.part"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_hub_that_sends_more_than_it_says_fills_no_disk(
    name: str, phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    hub.sends[name] = hub.repositories[NAME][name] + bytes(64 << 20)
    refused(phalanx("pull", NAME), f"{name} of {NAME} is not what the hub says")
    assert sum(file.stat().st_size for file in repository(variables).rglob("*") if file.is_file()) < 1 << 20


def test_what_the_hub_says_of_an_error_is_cut(phalanx: Run, hub: StubHub) -> None:
    hub.fails = b'{"error": "' + 300_000 * b"A" + b'"}'
    ended = phalanx("pull", NAME, "--json")
    assert ended.returncode == ExitCode.CONFIG and len(ended.stdout.splitlines()[-1]) < 2000, "Ollama's API reads lines"


def test_a_full_disk_is_one_line_and_the_pull_goes_on_when_there_is_room(
    phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    hub.repositories[NAME]["model.safetensors"] = WEIGHTS
    ended = phalanx("pull", NAME, shell="ulimit -f 24576")  # blocks of 512 bytes
    assert not snapshot(variables).exists()
    refused(ended, "could not be written: File too large")
    assert phalanx("pull", NAME).returncode == 0
    assert hub.ranges()[-1] == f"bytes={24576 * 512}-", "what was written is kept"
    assert (snapshot(variables) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(phalanx: Run, hub: StubHub) -> None:
    hub.announces[NAME] = 1 << 60
    refused(phalanx("pull", NAME), f"{NAME} needs 3221225472.00 GiB of disk, but")
    assert hub.ranges() == []


@contextmanager
def serving(model: str, variables: dict[str, str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server on a free port, and its URL."""
    small = ["--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1", "--port", "0"]
    command = [sys.executable, "-m", "phalanx", "serve", model, "--served-model-name", "served", *small]
    with log.open("w") as out:
        server = subprocess.Popen(command, env=variables, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + LIMIT_S
            while "phalanx is ready" not in log.read_text() and time.monotonic() < deadline and server.poll() is None:
                time.sleep(0.1)
            yield server, log.read_text().partition("phalanx is ready: ")[2].split()[0].removesuffix("/v1")
        finally:
            server.kill()
            server.wait()


def test_a_pulled_model_is_served_listed_and_stopped(
    phalanx: Run, variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    hub.repositories[NAME] = {file.name: file.read_bytes() for file in MODEL_DIR.iterdir() if file.is_file()}
    with serving(NAME, variables, tmp_path / "log") as (server, url):
        rows = {row["pid"]: row for row in json.loads(phalanx("ps", "--json").stdout)}
        row = rows[server.pid]
        assert (row["models"], row["served_as"], row["ranks"], row["supervised"]) == ([NAME], ["served"], 1, False)
        assert row["addresses"] == [url.removeprefix("http://")] and row["bytes"] > 1 << 20
        assert f"{server.pid}  " in phalanx("ps").stdout
        refused(phalanx("rm", NAME), f"{NAME} is served by process {server.pid}")
        answer = httpx.request("DELETE", f"{url}/api/delete", json={"model": NAME}, timeout=LIMIT_S)
        assert (answer.status_code, "is served" in answer.json()["error"]) == (400, True), answer.text
        refused(phalanx("stop", "no-such"), "There is no server", "'no-such'")
        stopped = phalanx("stop", "served")
        assert (stopped.returncode, stopped.stdout) == (0, f"stopped {server.pid}\n"), stopped.stderr
        assert server.wait(LIMIT_S) == 0, "it ended in order"
        assert server.pid not in {row["pid"] for row in json.loads(phalanx("ps", "--json").stdout)}
    assert phalanx("rm", NAME).returncode == 0


def test_the_file_of_a_served_gguf_model_may_be_deleted(
    phalanx: Run, variables: dict[str, str], tmp_path: Path
) -> None:
    """The server keeps to what it imported, also when its rank starts again; and that is not removed."""
    file = tmp_path / "tiny.gguf"
    write_tiny(file)
    with serving(str(file), variables, tmp_path / "log") as (server, url):
        file.unlink()
        (row,) = [row for row in json.loads(phalanx("ps", "--json").stdout) if row["pid"] == server.pid]
        (name,) = row["models"]
        assert name.startswith("tiny-")
        refused(phalanx("rm", name), f"{name} is served by process {server.pid}")
        (rank,) = [child for child in psutil.Process(server.pid).children() if "rank" in child.cmdline()]
        rank.kill()
        rank.wait()
        body = {"model": "served", "prompt": "hello", "max_tokens": 2}
        deadline = time.monotonic() + LIMIT_S
        while (answer := httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)).status_code == 503:
            assert "for good" not in (tmp_path / "log").read_text() and time.monotonic() < deadline, answer.text
            time.sleep(0.1)
        assert answer.status_code == 200, answer.text
        refused(phalanx("pull", str(file)), f"There is no file '{file}'")
        assert f"It was imported as {name}" in phalanx("show", str(file)).stderr
        write_tiny(file)
        assert Path(phalanx("pull", str(file)).stdout.strip()).name == name
        stopped = phalanx("stop", str(file))
        assert (stopped.returncode, stopped.stdout) == (0, f"stopped {server.pid}\n"), stopped.stderr


def test_a_gateway_is_listed_and_stopped(phalanx: Run, variables: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "gateway", "--worker-urls", "http://127.0.0.1:9", "--port", "0"]
    gateway = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert gateway.stdout is not None
    with gateway.stdout:
        try:
            url = gateway.stdout.readline().partition("ready: ")[2].split()[0]
            rows = {row["pid"]: row for row in json.loads(phalanx("ps", "--json").stdout)}
            row = rows[gateway.pid]
            assert (row["kind"], row["models"], row["supervised"]) == ("gateway", [], False)
            (address,) = row["addresses"]
            assert address in url
            (shown,) = (line for line in phalanx("ps").stdout.splitlines() if line.startswith(f"{gateway.pid} "))
            assert shown.split()[1:4] == ["gateway", address, "-"]
            stopped = phalanx("stop", address.rpartition(":")[2])
            assert (stopped.returncode, stopped.stdout) == (0, f"stopped {gateway.pid}\n"), stopped.stderr
            assert gateway.wait(LIMIT_S) == 0, "it ended in order"
        finally:
            gateway.kill()
            gateway.wait()


def pulls_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "pull" in child.cmdline():
                found.append(child)
    return found


def test_ollamas_api_pulls_beside_a_served_model_and_a_client_that_leaves_ends_the_pull(
    variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    hub.repositories[NAME]["model.safetensors"] = WEIGHTS
    hub.stops_at = 21 << 20
    with serving("demo", variables, tmp_path / "log") as (server, url), httpx.Client(timeout=LIMIT_S) as client:

        def lines_until(done: Callable[[dict[str, object]], bool]) -> list[dict[str, object]]:
            found = []
            with client.stream("POST", f"{url}/api/pull", json={"model": NAME}) as answer:
                for line in answer.iter_lines():
                    found.append(json.loads(line))
                    if done(found[-1]):
                        break
            return found

        lines_until(lambda line: line.get("total") == len(WEIGHTS) and line.get("completed", 0) > 15_000_000)
        _, alive = psutil.wait_procs(pulls_of(server.pid), timeout=LIMIT_S)
        assert alive == [], "the client has left"
        assert not snapshot(variables).exists()
        (part,) = (repository(variables) / "blobs").glob("*.part")
        have = part.stat().st_size
        hub.stops_at = None
        hub.go_on.set()
        assert lines_until(lambda line: False)[-1] == {"status": "success"}
        assert hub.ranges()[-1] == f"bytes={have}-" and have > 10_000_000
        tags = client.get(f"{url}/api/tags").json()["models"]
        assert [tag["name"] for tag in tags] == ["served", NAME]
        with running_gateway(url) as before:
            assert [tag["name"] for tag in client.get(f"{before}/api/tags").json()["models"]] == ["served"]
            for body in ({"model": "served", "name": NAME}, {"name": NAME}):
                for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
                    refusal = client.request(method, f"{before}{path}", json=body)
                    assert (refusal.status_code, "admin-key" in refusal.json()["error"]) == (403, True), refusal.text
        failed = client.post(f"{url}/api/pull", json={"model": "owner/none", "stream": False})
        assert failed.status_code == 400 and "no such repository" in failed.json()["error"]
        assert client.request("DELETE", f"{url}/api/delete", json={"model": NAME}).status_code == 200
        assert not repository(variables).exists()
