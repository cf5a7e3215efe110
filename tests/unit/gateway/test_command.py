"""`phalanx gateway`: where its keys come from."""

from __future__ import annotations

import pytest

from phalanx.cli import gateway
from phalanx.cli.main import main
from phalanx.errors import ExitCode
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.replicas_file import specs_of_urls

COMMAND = ["gateway", "--worker-urls", "http://a"]
SINGLE = {
    "--admin-key": "PHALANX_GATEWAY_ADMIN_KEY",
    "--worker-key": "PHALANX_WORKER_KEY",
    "--worker-admin-key": "PHALANX_WORKER_ADMIN_KEY",
}
"""Flags of one key each, and their variables."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[GatewayConfig]:
    """What the gateway would have served with."""
    seen: list[GatewayConfig] = []
    for variable in ("PHALANX_API_KEY", *SINGLE.values()):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gateway, "serve", lambda config: seen.append(config) or 0)
    return seen


def test_keys_of_replicas_and_clients_come_from_flags_before_variables(served, monkeypatch):
    assert main(COMMAND) == 0
    monkeypatch.setenv("PHALANX_API_KEY", "one two")
    monkeypatch.setenv("PHALANX_WORKER_ADMIN_KEY", "variable")
    assert main(COMMAND) == main([*COMMAND, "--worker-admin-key", "flag", "--api-key", "three"]) == 0
    found = [(config.api_key, config.worker_admin_key) for config in served]
    assert found == [((), None), (("one", "two"), "variable"), (("three",), "flag")]


@pytest.mark.parametrize(("flag", "variable"), SINGLE.items())
def test_a_key_comes_from_a_flag_a_file_or_a_variable(served, monkeypatch, tmp_path, capsys, flag, variable):
    file, two, none, odd = (tmp_path / name for name in ("key", "two", "none", "odd"))
    file.write_text("# a comment\n file-key \n")
    two.write_text("one\ntwo\n")
    none.write_text("\n")
    odd.write_text("\u00fc\n")
    assert main([*COMMAND, f"{flag}-file", str(file)]) == 0
    monkeypatch.setenv(variable, "variable")
    for more in ([], [flag, "flag"], [f"{flag}-file", str(file)]):
        assert main([*COMMAND, *more]) == 0
    field = flag[2:].replace("-", "_")
    assert [getattr(config, field) for config in served] == ["file-key", "variable", "flag", "file-key"]
    for file in (two, none, odd):
        assert main([*COMMAND, f"{flag}-file", str(file)]) == ExitCode.CONFIG
        assert f"{flag}-file" in capsys.readouterr().err
    assert main([*COMMAND, f"{flag}-file", str(two), flag, "flag"]) == ExitCode.CONFIG
    monkeypatch.setenv(variable, " a b ")
    assert main(COMMAND) == ExitCode.CONFIG and variable in capsys.readouterr().err
    assert len(served) == 4


def test_the_servers_admin_key_is_not_the_gateways(served, monkeypatch):
    """Who may move streams may not so much as see the replicas."""
    monkeypatch.setenv("PHALANX_ADMIN_KEY", "of-servers")
    assert main(COMMAND) == 0 and served[0].admin_key is None


def test_clients_keys_come_from_a_file_too(served, tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n# two\nthree\n")
    assert main([*COMMAND, "--api-key", "zero", "--api-key-file", str(file)]) == 0
    assert served[0].api_key == ("zero", "one", "three")


@pytest.mark.parametrize("blank", ["", " \t"])
@pytest.mark.parametrize("name", ["PHALANX_API_KEY", *SINGLE.values()])
def test_a_variable_without_a_key_is_refused(served, monkeypatch, capsys, name, blank):
    monkeypatch.setenv(name, blank)
    assert main(COMMAND) == ExitCode.CONFIG
    assert f"{name} is set, but there is no key in it" in capsys.readouterr().err and not served


def test_the_limit_of_breaks_holds_before_the_first_byte_too(served):
    assert (
        main(COMMAND) == main([*COMMAND, "--migration-limit", "1"]) == main([*COMMAND, "--migration-limit", "0"]) == 0
    )
    assert [config.max_breaks for config in served] == [3, 1, 3]


@pytest.mark.parametrize("flag", ["--api-key", "--admin-key", "--worker-key", "--worker-admin-key"])
def test_a_key_that_no_header_can_have_is_refused(served, flag):
    for key in ("", " ", "\u00fc", "a\nb", " a"):
        assert main([*COMMAND, flag, key]) == ExitCode.CONFIG
    assert not served


@pytest.mark.parametrize(
    "words",
    [
        ["--worker-urls", "http://a,http://b/v1"],
        ["--worker-urls", "http://a", "http://b"],
        ["--worker-urls=http://a", "http://b"],
        ["--worker-urls", "http://a", "--worker-urls", "http://b"],
        ["--worker-urls", "http://a http://b"],
        ["--worker-urls", "http://a,", "http://b", "--port", "1"],
        ["--port", "1", "--worker-urls", "http://a", "--policy", "round_robin", "--worker-urls", "http://b"],
    ],
)
def test_urls_have_blanks_or_commas_between_them_or_a_flag_each(served, words):
    """As the routers of SMG and vLLM take them, beside commas."""
    assert main(["gateway", *words]) == 0
    assert [spec.url for spec in specs_of_urls(served[0].worker_urls)] == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--worker-urls"], "requires an argument"),
        (["--worker-urls", "--port", "1", "http://b"], ""),
        (["--port", "1", "http://b", "--worker-urls", "http://a"], "one argument too many"),
    ],
)
def test_a_word_behind_another_flag_is_no_url(served, capsys, words, said):
    assert main(["gateway", *words]) == ExitCode.USAGE and not served
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("urls", ["", " , "])
def test_a_gateway_needs_a_replica(urls, capsys):
    """As with a variable that is not set: `--worker-urls "$URLS"`."""
    assert main(["gateway", "--worker-urls", urls]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "The gateway has no replicas: neither" in said and "`phalanx up HOSTFILE --replicas N -- MODEL`" in said


def test_a_gateway_takes_replicas_from_one_place(tmp_path, capsys):
    (tmp_path / "replicas.toml").touch()
    flags = ["--worker-urls", "http://h:1", "--replicas", str(tmp_path / "replicas.toml")]
    assert main(["gateway", *flags]) == ExitCode.CONFIG
    assert "--worker-urls and --replicas both name the replicas" in capsys.readouterr().err
