"""`phalanx bench` against servers that answer, fail in every way, or never end."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.web import chunk, events, usage, web_server

from phalanx.cli import bench
from phalanx.cli.exits import INTERRUPTED
from phalanx.cli.main import main
from phalanx.cluster.local_servers import LocalServer
from phalanx.errors import ExitCode

MODELS = '{"data": [{"id": "org/m"}]}'
GOOD = events(chunk("a"), chunk("b"), chunk(finish="length"), usage(5, 2))
Reply = Callable[[str, Any], tuple[int, str]]


def answers(*replies: tuple[int, str]) -> Reply:
    """A server's answers to requests, in their order, the last one to all further ones."""
    count = iter(range(1 << 20))
    lock = threading.Lock()

    def answer(path: str, body: Any) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, MODELS
        with lock:
            return replies[min(next(count), len(replies) - 1)]

    return answer


def serve(url: str, *words: str, n: int = 4) -> int:
    """Measure with one request at a time."""
    load = ["--num-prompts", str(n), "--random-input-len", "3", "--random-output-len", "2", "--max-concurrency", "1"]
    return main(["bench", "serve", "--base-url", url, *load, *words])


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_server_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(answers((200, GOOD))) as url:
        saving = ["--save-result", "--result-dir", str(tmp_path / "new"), "--label", "of/it"]
        assert serve(url.removesuffix("/v1"), *saving) == ExitCode.OK
    found = result(tmp_path / "new")
    kept = {name: found[name] for name in ("completed", "failed", "total_input_tokens", "total_output_tokens")}
    assert kept == {"completed": 4, "failed": 0, "total_input_tokens": 20, "total_output_tokens": 8}
    assert (found["model_id"], found["label"], found["is_whole"], found["failures"]) == ("org/m", "of/it", True, {})
    assert found["p99_e2el_ms"] >= found["median_ttft_ms"] > 0
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("of-it-infqps-concurrency1-m-")
    assert "org/m: 4 of 4 requests" in capsys.readouterr().out


def test_requests_are_those_of_the_flags() -> None:
    seen: list[tuple[str, Any]] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        seen.append((path, body))
        return 200, GOOD

    with web_server(answer) as url:
        assert serve(url, "--model", "other", "--num-warmups", "0", n=2) == ExitCode.OK
    assert [path for path, _ in seen] == ["/v1/completions"] * 2
    assert {(body["model"], body["max_tokens"], len(body["prompt"])) for _, body in seen} == {("other", 2, 3)}


BAD = {
    "refused": ((500, '{"error": {"message": "no room"}}'), "answered 500: no room"),
    "no text": ((200, events(chunk(finish="stop"), usage(5, 0))), "The answer has no text."),
    "empty": ((200, ""), "broke off before its end"),
    "cut": ((200, events(chunk("a"), done=False)), "broke off before its end"),
    "garbage": ((200, "data: {nope\n\ndata: [DONE]\n\n"), "an event that is not OpenAI's"),
    "error event": ((200, events(chunk("a"), {"error": {"message": "engine gone"}})), "engine gone"),
}


@pytest.mark.parametrize(("reply", "said"), BAD.values(), ids=BAD)
def test_a_failed_request_is_counted_and_named_and_the_rest_goes_on(
    reply: tuple[int, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (200, GOOD)
    with web_server(answers(good, good, reply, good)) as url:  # the first is the warm-up
        assert serve(url, "--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"]) == (3, 1)
    assert found["total_output_tokens"] == 6  # nothing of the bad one
    ((failure, count),) = found["failures"].items()
    assert said in failure and count == 1


def test_many_different_failures_are_shown_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [(500, json.dumps({"error": {"message": f"no room {number}"}})) for number in range(7)]
    with web_server(answers((200, GOOD), *bad)) as url:
        assert serve(url, n=8) == ExitCode.CRASH  # none was answered
    said = capsys.readouterr().err
    assert "failed, 2 times:" in said and "no room 6" in said
    assert "failed, 2 times: 2 other errors" in said


def test_if_the_warm_up_fails_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(answers((401, '{"error": {"message": "no key"}}'), (200, GOOD))) as url:
        assert serve(url, "--save-result", "--result-dir", str(tmp_path)) == ExitCode.CRASH
    said = capsys.readouterr()
    assert "answered 401: no key" in said.err and "--api-key" in said.err
    assert said.out == "" and list(tmp_path.iterdir()) == []


def test_no_server_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(answers((200, GOOD))) as url:
        pass
    assert serve(url) == ExitCode.CRASH
    assert f"No answer from {url}" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server hangs within the third answer that counts."""
    let_go = threading.Event()
    count = iter(range(100))

    def answer(path: str, body: Any) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, MODELS
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            let_go.wait(120)
        return 200, GOOD

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    try:
        with web_server(answer) as url:
            try:
                assert serve(url, "--save-result", "--result-dir", str(tmp_path)) == INTERRUPTED
            finally:
                let_go.set()
    finally:
        signal.signal(signal.SIGINT, before)
    found = result(tmp_path)
    assert (found["completed"], found["failed"], found["num_prompts"], found["is_whole"]) == (2, 0, 4, False)
    said = capsys.readouterr()
    assert "Interrupted: requests under way do not count." in said.err and "2 of 4 requests" in said.out


# The server's address ------------------------------------------------------------------------------------------------


def running(*addresses: str) -> list[LocalServer]:
    return [LocalServer(pid=1, models=[], addresses=list(addresses), ranks=1, bytes=0, supervised=False)]


@pytest.mark.parametrize(
    ("found", "target", "url"),
    [
        ([], {}, "http://127.0.0.1:8000/v1"),
        (running("0.0.0.0:9"), {}, "http://127.0.0.1:9/v1"),
        (running("[::]:9"), {}, "http://[::1]:9/v1"),
        (running("10.0.0.1:9"), {"port": 7}, "http://127.0.0.1:7/v1"),
        (running("10.0.0.1:9"), {"host": "::1"}, "http://[::1]:8000/v1"),
        (running("10.0.0.1:9"), {"base_url": "https://x/v1/"}, "https://x/v1"),
    ],
)
def test_the_server_is_the_one_that_was_named_or_the_one_that_runs(
    found: list[LocalServer], target: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "local_servers", lambda: found)
    assert bench._url(bench.TargetConfig(**target)) == url


def test_of_several_servers_one_has_to_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "local_servers", lambda: running("127.0.0.1:1", "127.0.0.1:2"))
    assert main(["bench", "serve"]) == ExitCode.CONFIG
    assert "serves at 127.0.0.1:1, 127.0.0.1:2" in capsys.readouterr().err


# compare, report -----------------------------------------------------------------------------------------------------


def test_two_servers_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    prompts: dict[str, list[Any]] = {"one": [], "two": []}

    def of(name: str) -> Reply:
        def answer(path: str, body: Any) -> tuple[int, str]:
            if path == "/v1/models":
                return 200, MODELS
            order.append(name)
            prompts[name].append(body["prompt"])
            return 200, GOOD

        return answer

    file = tmp_path / "both.json"
    words = ["--rounds", "2", "--num-prompts", "1", "--save-result", "--result-dir"]
    with web_server(of("one")) as a, web_server(of("two")) as b:
        code = main(["bench", "compare", f"one={a}", b, *words, str(tmp_path), "--result-filename", file.name])
    assert code == ExitCode.OK
    assert order == ["one", "one", "two", "two", "two", "one"]  # of the first two of each one is the warm-up
    assert prompts["one"] == prompts["two"] and len({tuple(prompt) for prompt in prompts["one"]}) == 3
    found = json.loads(file.read_text())
    assert {name: len(side["rounds"]) for name, side in found["servers"].items()} == {"one": 2, "B": 2}
    ratio = found["ratios"]["output_throughput"]
    assert ratio["min"] <= ratio["max"] and ratio["ratio"] > 0
    assert "one / B" in capsys.readouterr().out
    assert main(["bench", "report", str(file), "-o", str(tmp_path / "a-page.md")]) == ExitCode.OK
    page = (tmp_path / "a-page.md").read_text()
    assert page.startswith("# A page\n") and "output throughput" in page


def test_ctrl_c_in_a_later_round_keeps_the_rounds_before(tmp_path: Path) -> None:
    count = iter(range(100))
    let_go = threading.Event()

    def answer(path: str, body: Any) -> tuple[int, str]:
        if path != "/v1/models" and next(count) == 3:  # in the second round
            os.kill(os.getpid(), signal.SIGINT)
            let_go.wait(120)
        return (200, MODELS) if path == "/v1/models" else (200, GOOD)

    words = ["--num-prompts", "1", "--num-warmups", "0", "--save-result", "--result-dir", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with web_server(answer) as url:
            try:
                assert main(["bench", "compare", url, url, *words]) == INTERRUPTED
            finally:
                let_go.set()
    finally:
        signal.signal(signal.SIGINT, before)
    found = result(tmp_path)
    assert [len(side["rounds"]) for side in found["servers"].values()] == [1, 1]
    assert found["ratios"] and not found["is_whole"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "http://a"], "takes two addresses"),
        (["compare", "http://a", "http://b", "http://c"], "takes two addresses"),
        (["compare", "x=http://a", "x=http://b"], "of different names"),
        (["compare", "localhost:8000", "http://b"], "'localhost:8000' is not an address"),
        (["compare", "http://a", "http://b", "--port", "9"], "takes its two addresses as arguments"),
        (["compare", "http://a", "http://b", "--label", "x"], "--label belongs to `bench serve`"),
        (["compare", "http://a", "http://b", "--metric-percentiles", "5"], "--metric-percentiles belongs to"),
        (["serve", "http://a"], "takes no 'http://a'"),
        (["serve", "--base-url", "http://a", "--port", "9"], "are both given"),
        (["serve", "--port", "9", "--percentile-metrics", "ttft,tps"], "'tps' is none of ttft, tpot"),
        (["serve", "--port", "9", "--metric-percentiles", "99,x"], "'99,x' is not numbers from 0 to 100"),
        (["serve", "--port", "9", "--metric-percentiles", "101"], "'101' is not numbers from 0 to 100"),
        (["serve", "--port", "9", "--request-rate", "0"], "--request-rate is 0"),
        (["serve", "--port", "9", "--rounds", "2"], "--rounds belongs to `bench compare`"),
        (["serve", "--port", "9", "-o", "x.md"], "-o belongs to `bench report`"),
        (["report", "-o", "x.md"], "takes JSON files"),
        (["report", "x.json"], "takes JSON files"),
        (["report", "x.json", "-o", "x.pdf"], "ends in .md or .html"),
        (["report", "x.json", "-o", "x.md", "--seed", "3"], "takes JSON files and -o only"),
        (["report", "x.json", "-o", "x.md", "--json"], "takes JSON files and -o only"),
        (["report", "x.json", "-o", "x.md", "--api-key", "k"], "takes JSON files and -o only"),
        (["report", "none.json", "-o", "x.md"], "none.json cannot be read"),
        (["serve", "--port", "9", "--result-filename", "x"], "need --save-result"),
        (["compare", "http://a", "http://b", "--result-dir", "x"], "need --save-result"),
    ],
)
def test_words_without_a_meaning_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == ExitCode.CONFIG
    assert said in " ".join(capsys.readouterr().err.split())


def test_numbers_out_of_range_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--num-prompts", "0"]) == ExitCode.USAGE
    assert "'--num-prompts'" in capsys.readouterr().err
