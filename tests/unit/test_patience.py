"""Time decides no test: on a busy machine a process may stand still for seconds, and all be ten times slower."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MIN_S = 60.0
POLLED_S = 1.0  # less is a pause between two looks, or a limit that a test plays out
WAITS = ("timeout", "wait", "wait_for", "join", "result", "alarm", "settimeout", "communicate")
NAMED = (*WAITS, "run", "create_connection", "check_output")  # take `timeout=`; a request may have a field of that name
ASKS = ("get", "post", "stream", "request", "Client", "AsyncClient")  # of httpx, which waits for five seconds


def seconds(node: ast.expr) -> float | None:
    """The number that this is."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


def hurries(source: str) -> Iterator[int]:
    """Lines whose wait ends before a busy machine may have come to it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        limits = [named["timeout"]] if "timeout" in named and name in (*NAMED, *ASKS) else []
        limits += node.args[-1:] if name in WAITS and len(node.args) == (2 if name == "wait_for" else 1) else []
        if any((limit := seconds(one)) is not None and POLLED_S < limit < MIN_S for one in limits):
            yield node.lineno
        if ast.unparse(node.func) in {f"httpx.{ask}" for ask in ASKS} and "timeout" not in named:
            yield node.lineno


def test_no_test_hurries() -> None:
    files = [file for file in TESTS.rglob("*.py") if "clients" not in file.parts]
    found = [f"{file.relative_to(TESTS)}:{line}" for file in files for line in hurries(file.read_text())]
    assert len(files) > 250 and not found, found


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(30)", "asyncio.timeout(5)", "asyncio.wait_for(task, 5)", "run(words, timeout=10)",
        "httpx.get(url)", "thread.join(10)", "socket.create_connection(at, timeout=5)",
    ],
)  # fmt: skip
def test_what_hurries(line: str) -> None:
    assert [*hurries(line)] == [1]


@pytest.mark.parametrize("line", ["process.wait(60)", "over.wait(0.01)", "thread.join()", "httpx.get(url, timeout=60)"])
def test_what_does_not(line: str) -> None:
    assert [*hurries(line)] == []
