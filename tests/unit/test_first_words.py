"""`phalanx` without a command."""

from __future__ import annotations

import pytest

from phalanx.cli.main import main
from phalanx.config import DEFAULT_PORT


@pytest.mark.parametrize("columns", [40, 80])
def test_the_commands_that_come_next(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("phalanx.cli.first_words._computes", lambda: True)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[lines.index("Next:") + 1 : -1]
    assert [line.split()[1] for line in after] == ["serve", "chat", "hostfile"]
    assert f"chat http://127.0.0.1:{DEFAULT_PORT}" in after[1]  # `phalanx chat` alone starts another server
    assert all(len(line) <= columns and ("#" in line) is (columns == 80) for line in after)
