"""`phalanx gateway`: where its keys come from."""

from __future__ import annotations

import pytest

from phalanx.cli import gateway
from phalanx.cli.main import main
from phalanx.errors import ExitCode
from phalanx.gateway.settings.gateway_settings import GatewayConfig

COMMAND = ["gateway", "--worker-urls", "http://a"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[GatewayConfig]:
    """What the gateway would have served with."""
    seen: list[GatewayConfig] = []
    for name in ("PHALANX_API_KEY", "PHALANX_WORKER_KEY", "PHALANX_WORKER_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gateway, "serve", lambda config: seen.append(config) or 0)
    return seen


def test_keys_of_replicas_and_clients_come_from_flags_before_variables(served, monkeypatch):
    assert main(COMMAND) == 0
    monkeypatch.setenv("PHALANX_API_KEY", "one two")
    monkeypatch.setenv("PHALANX_WORKER_ADMIN_KEY", "variable")
    assert main(COMMAND) == main([*COMMAND, "--worker-admin-key", "flag", "--api-key", "three"]) == 0
    found = [(config.api_key, config.worker_admin_key) for config in served]
    assert found == [((), None), (("one", "two"), "variable"), (("three",), "flag")]


def test_the_key_of_replicas_comes_from_a_flag_a_file_or_a_variable(served, monkeypatch, tmp_path):
    file, two, none = (tmp_path / name for name in ("key", "two", "none"))
    file.write_text("# of the replicas\n file-key \n")
    two.write_text("one\ntwo\n")
    none.write_text("\n")
    assert main([*COMMAND, "--worker-key-file", str(file)]) == 0
    monkeypatch.setenv("PHALANX_WORKER_KEY", "variable")
    for more in ([], ["--worker-key", "flag"], ["--worker-key-file", str(file)]):
        assert main([*COMMAND, *more]) == 0
    assert [config.worker_key for config in served] == ["file-key", "variable", "flag", "file-key"]
    for file in (two, none):
        assert main([*COMMAND, "--worker-key-file", str(file)]) == ExitCode.CONFIG
    assert main([*COMMAND, "--worker-key-file", str(two), "--worker-key", "flag"]) == ExitCode.CONFIG
    assert len(served) == 4


@pytest.mark.parametrize("blank", ["", " \t"])
@pytest.mark.parametrize("name", ["PHALANX_API_KEY", "PHALANX_WORKER_KEY", "PHALANX_WORKER_ADMIN_KEY"])
def test_a_variable_without_a_key_is_refused(served, monkeypatch, capsys, name, blank):
    monkeypatch.setenv(name, blank)
    assert main(COMMAND) == ExitCode.CONFIG
    assert f"{name} is set, but there is no key in it" in capsys.readouterr().err and not served


def test_the_limit_of_breaks_holds_before_the_first_byte_too(served):
    assert (
        main(COMMAND) == main([*COMMAND, "--migration-limit", "1"]) == main([*COMMAND, "--migration-limit", "0"]) == 0
    )
    assert [config.most_breaks for config in served] == [3, 1, 3]


@pytest.mark.parametrize("flag", ["--api-key", "--admin-key", "--worker-key", "--worker-admin-key"])
def test_a_key_that_no_header_can_have_is_refused(served, flag):
    for key in ("", " ", "\u00fc", "a\nb", " a"):
        assert main([*COMMAND, flag, key]) == ExitCode.CONFIG
    assert not served


@pytest.mark.parametrize("urls", ["", " , "])
def test_a_gateway_needs_a_replica(urls, capsys):
    """As with a variable that is not set: `--worker-urls "$URLS"`."""
    assert main(["gateway", "--worker-urls", urls]) == ExitCode.CONFIG
    assert "The gateway has no replicas" in capsys.readouterr().err
