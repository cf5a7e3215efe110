"""`phalanx explain` prints the story of a request, and says plainly why there is none."""

from __future__ import annotations

import json

import pytest
from support.web import raw_server, web_server

from phalanx.cli.main import main
from phalanx.errors import ExitCode

LIFE = {
    "id": "chatcmpl-1",
    "model": "tiny",
    "state": "finished",
    "seconds": {"total": 2.5},
    "story": ["It waited 0.25 s for a row.", "512 of 600 prompt tokens were cached in memory: \x1b[31mred."],
}


def test_the_story_is_printed_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(path: str, body: object) -> tuple[int, str]:
        asked.append(path)
        return 200, json.dumps(LIFE)

    with web_server(answer) as url:
        assert main(["explain", "chatcmpl-1/../x", "--url", url]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("chatcmpl-1 (tiny): finished, 2.5 s\nIt waited 0.25 s for a row.\n512 of 600")
    assert "\x1b" not in out and asked == ["/v1/requests/chatcmpl-1%2F..%2Fx"]


def test_for_programs_it_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, json.dumps(LIFE))) as url:
        assert main(["explain", "x", "--url", url, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == LIFE


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, {"error": {"message": "No request 'x' of this key"}}, "No request 'x' of this key"),
        (401, {"error": {"message": "You didn't provide an API key."}}, "or the server's admin key, as --api-key"),
        (200, [], "status 200"),
        (500, {"error": "odd"}, "status 500"),
    ],
)
def test_errors(status: int, body: object, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, _: (status, json.dumps(body))) as url:
        assert main(["explain", "x", "--url", url]) == ExitCode.CONFIG
    assert said in " ".join(capsys.readouterr().err.split())


def test_where_ids_stand_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = "No request 'x' of this key. The id is that of the answer, or its header x-request-id."
    with web_server(lambda path, _: (404, json.dumps({"error": {"message": said}}))) as url:
        assert main(["explain", "x", "--url", url]) == ExitCode.CONFIG
    assert capsys.readouterr().err.count("x-request-id") == 1


def test_what_is_no_phalanx_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno") as url:
        assert main(["explain", "x", "--url", url]) == ExitCode.CONFIG
    assert "does not answer as phalanx does" in " ".join(capsys.readouterr().err.split())


def test_an_address_without_a_server_is_told_as_chat_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, "{}")) as url:
        pass
    assert main(["explain", "x", "--url", url]) == ExitCode.CRASH
    told = " ".join(capsys.readouterr().err.split())
    assert f"No answer from {url}" in told and "Is the server running there?" in told
