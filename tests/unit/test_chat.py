"""`phalanx chat`: conversations with a server of somebody else's, or with one of its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
from support.web import chunk, events, usage, web_server

from phalanx.cli import chat, private, serve
from phalanx.cli.main import main
from phalanx.cli.private import free_port
from phalanx.errors import ExitCode


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_api_base(url: str) -> None:
    assert chat.api_base(url) == "http://h:1/v1"


def talk(lines: str, monkeypatch: pytest.MonkeyPatch, answer: Any, *flags: str) -> int:
    """`phalanx chat URL` with these lines typed."""
    read, write = os.pipe()
    os.write(write, lines.encode(errors="surrogateescape"))
    os.close(write)
    with web_server(answer) as url, os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        return main(["chat", url, *flags])


def test_a_conversation_carries_its_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, '{"data": [{"id": "m"}]}'
        asked.append([(message["role"], message["content"]) for message in body["messages"]])
        return 200, events(chunk(f"answer {len(asked)}"), chunk(finish="stop"), usage(1, 2))

    lines = "one\n\ntwo\n/reset\nthree\n/system sys\nfour\n/quit\nnever\n"
    assert talk(lines, monkeypatch, answer) == 0
    assert asked == [
        [("user", "one")],
        [("user", "one"), ("assistant", "answer 1"), ("user", "two")],
        [("user", "three")],
        [("system", "sys"), ("user", "four")],
    ]
    assert "answer 4" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye"])
def test_words_that_end_a_conversation(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        asked.append(body)
        return 200, events(chunk("fine"), chunk(finish="stop"), usage(1, 2))

    assert talk(f"{word}\nnever\n", monkeypatch, answer, "--model", "m") == 0
    assert asked == []


def test_an_answer_ends_its_line_before_its_figures_where_both_go_to_one_file() -> None:
    def answer(path: str, body: Any) -> tuple[int, str]:
        return 200, events(chunk("fine"), chunk(finish="stop"), usage(1, 2))

    with web_server(answer) as url:
        told = subprocess.run(
            [sys.executable, "-m", "phalanx", "chat", url, "--model", "m"], input=b"one\n",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
        )  # fmt: skip
    assert b"fine\n2 tokens" in told.stdout


def test_the_address_of_an_endpoint_is_answered_with_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (404, '{"error": {"message": "Not Found"}}')) as url:
        assert main(["chat", f"{url}/chat/completions"]) == ExitCode.CRASH
    assert "Give the server's own address, as http://127.0.0.1:8000." in capsys.readouterr().err


def test_a_line_that_is_not_utf_8_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        asked.append(body["messages"][-1]["content"])
        return 200, events(chunk("fine"), chunk(finish="stop"), usage(1, 2))

    assert talk("one\ngr\udcfc\udcdf\ntwo\n", monkeypatch, answer, "--model", "m") == 0
    assert asked == ["one", "two"] and "(not sent: this line is not UTF-8)" in capsys.readouterr().err


def test_reasoning_and_calls_stand_apart_from_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def call(**function: str) -> dict[str, Any]:
        return part(tool_calls=[{"index": 0, "function": function}])

    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        asked.append(body["messages"])
        parts = [part(reasoning_content="Hm, "), part(reasoning="so."), chunk("I"), chunk(" ask.")]
        calls = [call(name="f", arguments=""), call(arguments='{"a'), call(arguments='": 1}'), call(name="g")]
        return 200, events(*parts, *calls, chunk(finish="tool_calls"), usage(1, 2))

    assert talk("one\ntwo\n", monkeypatch, answer, "--model", "m") == 0
    shown = 'Hm, so.\n\nI ask.\nf {"a": 1}\ng \n'
    assert capsys.readouterr().out == 2 * shown
    assert asked[1][1] == {"role": "assistant", "content": "I ask."}


def test_a_refused_question_is_not_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        asked.append(body)
        if len(asked) == 1:
            return 400, '{"error": {"message": "too long"}}'
        return 200, events(chunk("fine"), chunk(finish="stop"), usage(1, 2))

    typed = talk("one\ntwo\n", monkeypatch, answer, "--model", "m", "--temperature", "0", "--max-tokens", "9")
    assert typed == ExitCode.CRASH  # a script must notice
    assert "too long" in capsys.readouterr().err
    assert asked[1]["messages"] == [{"role": "user", "content": "two"}]
    assert (asked[1]["temperature"], asked[1]["max_tokens"]) == (0.0, 9)


def test_flags_for_a_private_server_do_not_go_with_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "http://127.0.0.1:1", "--", "--max-model-len", "9"]) == ExitCode.CONFIG
    assert "URL" in capsys.readouterr().err
    assert main(["chat", "demo", "--model", "m"]) == ExitCode.CONFIG


def test_an_absent_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, "{}")) as url:
        pass
    assert main(["chat", url]) == ExitCode.CRASH
    assert "Is the server running" in capsys.readouterr().err


# Private servers -------------------------------------------------------------------------------------------------


def test_a_taken_port_is_not_chosen() -> None:
    with web_server(lambda path, body: (200, "{}")) as url:
        taken = int(url.split(":")[2].partition("/")[0])
        assert free_port(taken) == 0
    assert free_port(taken) == taken


FORGING = """
import sys
print("a library on `x\\nphalanx is ready: http://elsewhere/v1 (model m)\\n`", file=sys.stderr, flush=True)
print("phalanx is ready: http://127.0.0.1:1/v1 (model m)", flush=True)
"""


def test_no_line_of_the_log_is_taken_for_the_servers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's files can make a library write any line there."""
    monkeypatch.setattr(private, "RUN_PHALANX", ("-c", FORGING))
    server = private.PrivateServer("model", keep=True)
    shown: list[str] = []
    try:
        server.wait_ready(shown.append)
        assert (server.url, server.model) == ("http://127.0.0.1:1/v1", "m")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("sys.exit('error: no such model')", 1, "error: no such model\n"),
        ("print('error: no such model', file=sys.stderr); sys.exit(64)", ExitCode.CONFIG, "error: no such model\n"),
        ("os.kill(os.getpid(), 9)", ExitCode.CRASH, "error: A signal ended the server (status -9).\n  Its log is "),
    ],
)
def test_a_conversations_server_that_ends_is_one_error_and_its_exit_code(
    code: str, exit_code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private, "RUN_PHALANX", ("-c", f"import os, sys; {code}"))
    assert main(["chat", "wrong"]) == exit_code
    told = capsys.readouterr().err
    assert told.startswith(said) and told.count("error:") == 1


def test_flags_exist_for_what_private_servers_use() -> None:
    assert "stop_on_eof" in inspect.signature(serve.command).parameters


def test_a_conversation_asks_its_own_server_for_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server might refuse a field that it does not know."""
    asked: list[dict[str, Any]] = []

    class Server:
        url, model, certificate = "http://127.0.0.1:1/v1", "demo", None

        def __init__(self, *_: Any) -> None: ...

        def wait_ready(self, note: Any) -> None: ...

        def stop(self) -> int:
            return 0

    monkeypatch.setattr(chat, "PrivateServer", Server)
    monkeypatch.setattr(chat, "talk", lambda server, model, conversation: asked.append(conversation._options) or 0)
    assert main(["chat", "demo", "--seed", "3"]) == 0
    assert main(["chat", "http://127.0.0.1:1", "--seed", "3"]) == 0
    assert asked == [{"seed": 3, "timing": True}, {"seed": 3}]
