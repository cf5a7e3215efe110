"""The command line: flags to settings, refusals, exit codes, what start-up imports. No engine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict, replace

from phalanx.cli import chat, generate, launch, rank, serve
from phalanx.cli.exits import INTERRUPTED
from phalanx.cli.main import COMMANDS, ELSEWHERE, HIDDEN, main
from phalanx.cli.terminal import report
from phalanx.config import EngineConfig, GroupConfig
from phalanx.errors import ConfigError, ExitCode, MemoryShortage, ModelNotFound, PhalanxError, exit_code_of
from phalanx.offline.engine_settings import check_trace
from phalanx.server.fields.openai_bodies import ChatMessage
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.speculation_config import NgramSpeculation
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import write_credentials

DEFAULT = ServerConfig(engine=EngineConfig(model="demo"))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What `serve` would have served."""
    seen: list[ServerConfig] = []
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    monkeypatch.setattr(serve, "run", lambda config, *_: seen.append(config) or 0)
    return seen


# Finding the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["version"], ["chat", "--help"], ["demo", "--help"], []]
)
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'aiohttp', 'numpy', 'torch'} & set(sys.modules);"
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS if name not in HIDDEN)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "--help" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == ExitCode.USAGE
    assert "serv" in capsys.readouterr().err


def test_help_is_a_word_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["help", "rm"]):
        assert main(words) == 0
        assert "phalanx rm [OPTIONS]" in capsys.readouterr().out or words == ["help"]


def test_commands_of_other_programs_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(ELSEWHERE) & set(COMMANDS) and set(ELSEWHERE.values()) <= set(COMMANDS)
    assert main(["run", "qwen3:4b", "two words"]) == ExitCode.CONFIG
    assert "Did you mean `phalanx chat qwen3:4b 'two words'`?" in capsys.readouterr().err


# serve -----------------------------------------------------------------------------------------------------------


def test_defaults(parsed: list[ServerConfig]) -> None:
    assert main(["serve"]) == 0
    assert parsed == [DEFAULT]


ENGINE_FLAGS: list[tuple[list[str], str, Any]] = [
    (["--speculative-config", '{"method": "ngram"}'], "speculative_config", NgramSpeculation()),
    (["--no-cpu-kernels"], "cpu_kernels", False),
    (["--cpu-precision", "fast"], "cpu_precision", "fast"),
    (["--threads", "3"], "threads", 3),
    (["some/model"], "model", "some/model"),
    (["--revision", "v2"], "revision", "v2"),
    (["--trust-remote-code"], "trust_remote_code", True),
    (["--dtype", "bfloat16"], "dtype", "bfloat16"),
    (["--max-model-len", "777"], "max_model_len", 777),
    (["--max-num-seqs", "5"], "max_num_seqs", 5),
    (["--max-num-batched-tokens", "64"], "max_num_batched_tokens", 64),
    (["--target-step-ms", "100"], "target_step_ms", 100.0),
    (["--decode-share", "0.75"], "decode_share", 0.75),
    (["--kv-cache-gb", "1.5"], "kv_cache_gb", 1.5),
    (["--prefix-cache-gb", "0.5"], "prefix_cache_gb", 0.5),
    (["--prefix-cache-dir", "/cache"], "prefix_cache_dir", "/cache"),
    (["--no-prefix-caching"], "prefix_cache_gb", 0.0),
    (["--no-enable-prefix-caching"], "prefix_cache_gb", 0.0),
    (["--memory-guard-gb", "0"], "memory_guard_gb", 0.0),
    (["--no-wired-limit"], "wired_limit", False),
    (["--trace", "plans.jsonl"], "trace", "plans.jsonl"),
]

DISK_FLAGS: list[tuple[list[str], str, Any]] = [
    (["--prefix-cache-disk-gb", "50"], "prefix_cache_disk_gb", 50.0),
    (["--verify-restores"], "verify_restores", True),
]

GROUP_FLAGS: list[tuple[list[str], str, Any]] = [
    ([], "tensor_parallel_size", 2),
    (["--backend", "ring"], "backend", "ring"),
    (["--collective", "star"], "collective", "star"),
    (["--no-check-collectives"], "check_collectives", False),
    (["--join-seconds", "9"], "join_seconds", 9.0),
    (["--heartbeat-timeout-seconds", "5"], "heartbeat_timeout_seconds", 5.0),
    (["--step-timeout-seconds", "20"], "step_timeout_seconds", 20.0),
    (["--inject", "garbage:rank=1,step=4"], "inject", "garbage:rank=1,step=4"),
    (["--tp", "3"], "tensor_parallel_size", 3),
]
"""Together with `--tp 2`."""

STAGE_FLAGS: list[tuple[list[str], str, Any]] = [
    ([], "pipeline_parallel_size", 2),
    (["--tp", "2,1"], "tensor_parallel_size", (2, 1)),
    (["--pp-split", "20,41"], "pp_split", (20, 41)),
    (["--pp-activation-dtype", "float16"], "pp_activation_dtype", "float16"),
]
"""Together with `--pp 2`."""

SERVER_FLAGS: list[tuple[list[str], str, Any]] = [
    (["--host", "::1"], "host", "::1"),
    (["--port", "0"], "port", 0),
    (["--ollama-port", "11434"], "ollama_port", 11434),
    (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
    (["--api-key", "k1", "--api-key", "k2"], "api_key", ("k1", "k2")),
    (["--admin-key", "k3"], "admin_key", "k3"),
    (["--metrics-open"], "metrics_open", True),
    (["--allowed-hosts", "a", "--allowed-hosts", "*.b.c"], "allowed_hosts", ("a", "*.b.c")),
    (["--allowed-hosts", "*"], "allowed_hosts", ("*",)),
    (["--allowed-origins", "https://a", "--allowed-origins", "*"], "allowed_origins", ("https://a", "*")),
    (["--allowed-origins", "chrome-extension://*"], "allowed_origins", ("chrome-extension://*",)),
    (["--allowed-origins", "https://*.example.com:8443"], "allowed_origins", ("https://*.example.com:8443",)),
    (["--queue", "0"], "queue", 0),
    (["--max-connections", "9"], "max_connections", 9),
    (["--max-connections-per-address", "3"], "max_connections_per_address", 3),
    (["--max-body-mb", "0.5"], "max_body_mb", 0.5),
    (["--max-n", "3"], "max_n", 3),
    (["--max-prompts", "3"], "max_prompts", 3),
    (["--no-clamp-max-tokens"], "clamp_max_tokens", False),
    (["--keepalive-seconds", "0.5"], "keepalive_seconds", 0.5),
    (["--drain-seconds", "0"], "drain_seconds", 0.0),
    (["--stall-seconds", "9"], "stall_seconds", 9.0),
    (["--default-chat-template-kwargs", '{"a": 1}'], "default_chat_template_kwargs", {"a": 1}),
    (["--tool-call-parser", "mistral"], "tool_call_parser", "mistral"),
    (["--reasoning-parser", "none"], "reasoning_parser", "none"),
    (["--tools", "drop"], "tools", "drop"),
    (["--enable-auto-tool-choice"], "enable_auto_tool_choice", True),
    (["--no-enable-auto-tool-choice"], "enable_auto_tool_choice", False),
    (["--log-level", "debug"], "log_level", "debug"),
]


@pytest.mark.parametrize(("flags", "field", "value"), ENGINE_FLAGS)
def test_engine_flag(parsed: list[ServerConfig], flags: list[str], field: str, value: Any) -> None:
    assert main(["serve", *flags]) == 0
    assert asdict(parsed[0].engine) == {**asdict(DEFAULT.engine), field: value}


@pytest.mark.parametrize(("flags", "field", "value"), DISK_FLAGS)
def test_disk_flag(parsed: list[ServerConfig], flags: list[str], field: str, value: Any) -> None:
    assert main(["serve", "--prefix-cache-dir", "/cache", *flags]) == 0
    assert asdict(parsed[0].engine) == {**asdict(DEFAULT.engine), "prefix_cache_dir": "/cache", field: value}


@pytest.mark.parametrize("name", ["--tp", "-tp", "--tensor-parallel-size"])
@pytest.mark.parametrize(("flags", "field", "value"), GROUP_FLAGS)
def test_group_flag(parsed: list[ServerConfig], name: str, flags: list[str], field: str, value: Any) -> None:
    assert main(["serve", name, "2", *flags]) == 0
    assert asdict(parsed[0].engine) == {**asdict(DEFAULT.engine), "tensor_parallel_size": 2, field: value}


@pytest.mark.parametrize("name", ["--pp", "-pp", "--pipeline-parallel-size"])
@pytest.mark.parametrize(("flags", "field", "value"), STAGE_FLAGS)
def test_stage_flag(parsed: list[ServerConfig], name: str, flags: list[str], field: str, value: Any) -> None:
    assert main(["serve", name, "2", *flags]) == 0
    assert asdict(parsed[0].engine) == {**asdict(DEFAULT.engine), "pipeline_parallel_size": 2, field: value}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "2,1"], "--tp 2,1 is for 2 stages, but --pp is 1.\n  Use --pp 2"),
        (
            ["--pp", "2", "--backend", "ring"],
            "how several ranks talk, but each stage has one.\n  Add --tp",
        ),
        (["--pp", "3", "--tp", "2,1"], "--tp 2,1 is for 2 stages, but --pp is 3"),
        (["--pp", "4", "--tp", "8"], "--tp and --pp ask for 32 ranks; 16 are the most"),
        (["--pp-split", "20,41"], "--pp-split is for stages, and there is one"),
        (["--pp-activation-dtype", "float16"], "--pp-activation-dtype is for stages, and there is one"),
        (["--pp", "2", "--pp-split", "20,30,11"], "--pp-split 20,30,11 and --pp 2 differ in the number of stages."),
        (["--pp", "2", "--inject", "cut:rank=2,step=4"], "there is no rank 2"),
        (["--pp", "2", "--attach", "/s"], "--attach waits for ranks of another launcher, which starts one stage"),
    ],
)
def test_stage_flags_that_contradict_each_other(
    parsed: list[ServerConfig], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err and not parsed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "2,x"], "whole numbers"),
        (["--tp", "0"], "whole numbers"),
        (["--pp", "2", "--tp", "2,"], "whole numbers"),
        (["--pp-split", "1.5"], "whole numbers"),
        (["--pp", "0"], "0 is not a whole number, 1 to 16"),
        (["--pp", "2", "--pp-activation-dtype", "nonsense"], "'nonsense' is not one of 'model'"),
    ],
)
def test_values_of_stage_flags(
    parsed: list[ServerConfig], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) != 0
    words = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in words and flags[-2] in words and not parsed


@pytest.mark.parametrize(("flags", "field", "value"), SERVER_FLAGS)
def test_server_flag(parsed: list[ServerConfig], flags: list[str], field: str, value: Any) -> None:
    assert main(["serve", *flags]) == 0
    assert asdict(parsed[0]) == {**asdict(DEFAULT), field: value}


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_forms_of_calls_have_known_names(parsed: list[ServerConfig], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} 'klingon' is not known.") as caught:
        main(["serve", flag, "klingon"])
    assert "mistral" in caught.value.remedy
    assert not parsed


def test_every_setting_has_a_flag() -> None:
    """A setting that cannot be set, or a flag nobody tested, shows here."""
    flags = ENGINE_FLAGS + DISK_FLAGS + GROUP_FLAGS + STAGE_FLAGS
    assert {field for _, field, _ in flags} == set(EngineConfig.__struct_fields__)
    tested = {field for _, field, _ in SERVER_FLAGS} | {"chat_template", "engine", "ssl_certfile", "ssl_keyfile"}
    assert tested == set(ServerConfig.__struct_fields__)


def test_certificate_files(parsed: list[ServerConfig], tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "key.pem"
    assert main(["serve", "--ssl-certfile", str(certificate)]) == ExitCode.USAGE
    for file in (certificate, key):
        file.write_text("x")
    assert main(["serve", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]) == 0
    assert (parsed[0].ssl_certfile, parsed[0].ssl_keyfile) == (str(certificate), str(key))


def test_chat_template_file(parsed: list[ServerConfig], tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    assert main(["serve", "--chat-template", str(file)]) == ExitCode.USAGE
    file.write_text("{{ messages }}")
    assert main(["serve", "--chat-template", str(file)]) == 0
    assert parsed[0].chat_template == str(file)


def test_keys_from_file_and_environment(
    parsed: list[ServerConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    monkeypatch.setenv("PHALANX_API_KEY", "from-environment")
    assert main(["serve"]) == 0
    assert main(["serve", "--api-key-file", str(file), "--api-key", "zero"]) == 0
    monkeypatch.setenv("PHALANX_API_KEY", "several keys")
    assert main(["serve"]) == 0
    keys = [config.api_key for config in parsed]
    assert keys == [("from-environment",), ("zero", "one", "two"), ("several", "keys")]


def test_a_key_that_no_client_can_send_is_refused(parsed: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", " a", "\u00fc", "a\nb"):
        assert main(["serve", "--api-key", key]) == ExitCode.CONFIG
    monkeypatch.setenv("PHALANX_API_KEY", "\u00fc")
    assert main(["serve"]) == ExitCode.CONFIG
    assert not parsed


@pytest.mark.parametrize("blank", ["", " \t"])
@pytest.mark.parametrize("name", ["PHALANX_API_KEY", "PHALANX_ADMIN_KEY"])
@pytest.mark.parametrize("command", [["serve"], ["up", "--hosts", "a,b"]], ids=["serve", "up"])
def test_a_variable_without_a_key_is_refused(
    parsed: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    name: str,
    blank: str,
) -> None:
    """As `--api-key ""` is: what fills it in has failed, and a server without a key would stand open."""
    monkeypatch.setenv(name, blank)
    assert main(command) == ExitCode.CONFIG
    assert f"{name} is set, but there is no key in it" in capsys.readouterr().err and not parsed


def test_the_admin_key_of_a_variable_a_flag_and_a_file(
    parsed: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["serve"]) == 0
    monkeypatch.setenv("PHALANX_ADMIN_KEY", "from-environment")
    assert main(["serve"]) == 0
    assert main(["serve", "--admin-key", "given"]) == 0
    (tmp_path / "key").write_text("filed\n")
    assert main(["serve", "--admin-key-file", str(tmp_path / "key")]) == 0
    assert [config.admin_key for config in parsed] == [None, "from-environment", "given", "filed"]
    assert main(["serve", "--admin-key-file", str(tmp_path / "key"), "--admin-key", "given"]) == ExitCode.CONFIG


def test_a_clients_key_comes_from_a_flag_a_file_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a variable or a file with several, as servers read them, the first."""
    seen: list[str | None] = []

    def noted(base: str, key: str | None, model: str | None) -> Any:
        seen.append(key)
        raise ConfigError("enough")

    monkeypatch.setattr(chat, "talk", lambda address, *_: seen.append(address.key) or 0)
    monkeypatch.setattr(launch, "_served", noted)
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    (tmp_path / "keys").write_text("# ours\nfiled\nother\n")
    (tmp_path / "none").write_text("\n")
    for words in (["chat", "http://a"], ["launch", "codex"]):
        main(words)
        main([*words, "--api-key-file", str(tmp_path / "keys")])
        monkeypatch.setenv("PHALANX_API_KEY", "variable another")
        main(words)
        main([*words, "--api-key", "given"])
        assert seen == [None, "filed", "variable", "given"]
        for bad in (["--api-key", ""], ["--api-key", "a\nb"], ["--api-key-file", str(tmp_path / "none")]):
            assert main([*words, *bad]) == ExitCode.CONFIG and "--api-key" in capsys.readouterr().err
        monkeypatch.setenv("PHALANX_API_KEY", " ")
        assert main(words) == ExitCode.CONFIG and "PHALANX_API_KEY is set" in capsys.readouterr().err
        assert len(seen) == 4
        monkeypatch.delenv("PHALANX_API_KEY")
        seen.clear()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--port", "http"], ["--port", "http"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "1"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--kv-cache-gb", "nan"], ["--kv-cache-gb", "nan"]),
        (["--kv-cache-gb", "-1"], ["--kv-cache-gb", "-1"]),
        (["--log-level", "loud"], ["--log-level", "loud", "warning"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["demo", "extra"], ["extra"]),
    ],
)
def test_usage_errors_name_flag_and_value(
    parsed: list[ServerConfig], flags: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert all(word in said for word in named), said
    assert parsed == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            ["--max-num-seqs", "16", "--max-num-batched-tokens", "8"],
            ["--max-num-batched-tokens 8", "--max-num-seqs 16"],
        ),
        (["--no-prefix-caching", "--prefix-cache-gb", "1"], ["--no-prefix-caching", "--prefix-cache-gb 1"]),
        (["--verify-restores"], ["--verify-restores", "no --prefix-cache-dir", "leave --verify-restores out"]),
        (["--prefix-cache-disk-gb", "10"], ["--prefix-cache-disk-gb", "Add --prefix-cache-dir DIR"]),
        (["--api-key", " "], ["--api-key"]),
        (["--admin-key", ""], ["--admin-key", "empty"]),
        (["--admin-key", "schlüssel"], ["--admin-key", "ASCII"]),
        (["--admin-key", "k", "--api-key", "k"], ["--admin-key", "also an --api-key"]),
        (["--allowed-hosts", "http://a"], ["--allowed-hosts 'http://a'", "without scheme"]),
        (["--allowed-hosts", "a:8000"], ["--allowed-hosts 'a:8000'", "port"]),
        (["--allowed-hosts", "a*.example.com"], ["--allowed-hosts", "*.NAME"]),
        (["--allowed-origins", "chat.example.com"], ["--allowed-origins 'chat.example.com'", "https://"]),
        (["--allowed-origins", "https://a/"], ["--allowed-origins 'https://a/'", "without a path"]),
        (["--allowed-origins", "https://a*.example.com"], ["--allowed-origins", "`chrome-extension://*`"]),
        (["--served-model-name", ""], ["--served-model-name"]),
        (["--default-chat-template-kwargs", "[1]"], ["--default-chat-template-kwargs", "[1]"]),
        (["--backend", "ring"], ["--backend", "--tp"]),
        (["--collective", "ring"], ["--collective", "--tp"]),
        (["--tp", "2", "--inject", "kill:rank=2"], ["--inject", "no rank 2"]),
        (["--tp", "2", "--inject", "kill"], ["--inject", "KIND:rank=R", "garbage"]),
        (["--tp", "2", "--inject", "kill:rank=x"], ["--inject", "rank=x"]),
    ],
)
def test_contradictions_are_explained(
    parsed: list[ServerConfig], flags: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert said.startswith("error:")
    assert all(word in said for word in named), said
    assert parsed == []


@pytest.mark.parametrize("flag", ["--api-key-file", "--chat-template"])
def test_a_file_that_is_not_text_is_named(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"caf\xe9")
    assert main(["serve", flag, str(tmp_path / "file")]) == ExitCode.CONFIG
    assert f"error: {flag} {tmp_path / 'file'} is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "why"), [("none/x", "No such file or directory"), (".", "Is a directory")])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(
    parsed: list[ServerConfig], file: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--trace", str(tmp_path / file)]) == ExitCode.CONFIG
    assert f"cannot be written: {why}" in capsys.readouterr().err and not parsed
    assert main(["serve", "--trace", str(tmp_path / "x")]) == 0
    assert not (tmp_path / "x").exists()


def test_a_trace_in_a_closed_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="Permission denied"):
        check_trace(tmp_path / "x")


def test_a_certificate_that_is_not_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pem").write_bytes(b"\xff\xfe")
    assert main(["chat", "https://127.0.0.1:1", "--ssl-certfile", str(tmp_path / "x.pem")]) == ExitCode.CONFIG
    assert "x.pem is not a certificate (PEM)" in capsys.readouterr().err


def test_an_empty_key_file_is_named(
    parsed: list[ServerConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("# none\n")
    assert main(["serve", "--api-key-file", str(tmp_path / "keys")]) == ExitCode.CONFIG
    assert str(tmp_path / "keys") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert serve.is_loopback(host) is loopback


# Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.CONFIG),
        (ModelNotFound("x"), ExitCode.CONFIG),
        (MemoryShortage("x"), ExitCode.MEMORY),
        (PhalanxError("x"), ExitCode.CRASH),
    ],
)
def test_errors_end_with_one_line_a_remedy_and_their_code(
    error: PhalanxError, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.message, error.remedy = "[red]it[/] broke", "Mend it."

    def fail(config: ServerConfig, *_: Path | None) -> int:
        raise error

    monkeypatch.setattr(serve, "run", fail)
    assert main(["serve"]) == code == exit_code_of(error)
    assert capsys.readouterr().err == "error: [red]it[/] broke\n  Mend it.\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: ServerConfig, *_: Path | None) -> int:
        raise PhalanxError("broken")

    monkeypatch.setattr(serve, "run", fail)
    with pytest.raises(PhalanxError, match="broken"):
        main(["serve", "--log-level", "debug"])


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "Give this user access"), (errno.EROFS, "takes no changes"), (errno.EIO, "")]
)
def test_a_file_that_the_system_refuses_is_no_crash(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/locked/x")

    monkeypatch.setattr(serve, "run", fails)
    assert main(["serve"]) == ExitCode.CRASH
    said = capsys.readouterr().err
    assert said.startswith(f"error: /locked/x: {os.strerror(number)}.\n") and remedy in said


def test_an_error_of_the_system_without_a_file_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(serve, "run", fails)
    with pytest.raises(OSError):
        main(["serve"])


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: ServerConfig, *_: Path | None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", interrupt)
    assert main(["serve"]) == 130


def test_no_remedy_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(PhalanxError("x"))
    assert capsys.readouterr().err == "error: x\n"


# rank ------------------------------------------------------------------------------------------------------------


def test_rank_passes_its_settings_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank, "run_rank", lambda *args: seen.append(args) or int(ExitCode.DESYNC))
    config = EngineConfig(model="demo", max_num_seqs=3)
    text = msgspec.json.encode(config).decode()
    assert main(["rank", "demo", "--rank", "1", "--socket", "/s", "--config", text]) == ExitCode.DESYNC
    assert seen == [(config, None, None, "/s", 1)]


def test_rank_passes_its_group_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank, "run_rank", lambda *args: seen.append(args) or 0)
    group = GroupConfig(size=2, backend="ring", nonce=5, control="/run/control")
    text = msgspec.json.encode(group).decode()
    assert main(["rank", "demo", "--rank", "1", "--socket", "/s", "--group", text]) == 0
    own = make_credentials(["a", "b"])[1]
    write_credentials(tmp_path / "credentials", own)
    apart = replace(group, control="127.0.0.1:1")
    words = ["--group", msgspec.json.encode(apart).decode(), "--credentials", str(tmp_path / "credentials")]
    assert main(["rank", "demo", "--rank", "1", "--socket", "/s", *words]) == 0
    config = EngineConfig(model="demo")
    assert seen == [(config, group, None, "/s", 1), (config, apart, own, "/s", 1)]
    assert main(["rank", "demo", "--rank", "2", "--socket", "/s", "--group", text]) == ExitCode.CONFIG
    assert main(["rank", "demo", "--rank", "1", "--socket", "/s", "--group", "{}"]) == ExitCode.CONFIG
    short = text.replace('"hosts":[]', '"hosts":["a"]')
    assert main(["rank", "demo", "--rank", "1", "--socket", "/s", "--group", short]) == ExitCode.CONFIG
    assert "hosts has 1 entries for 2 ranks" in capsys.readouterr().err


def test_rank_reads_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank, "run_launched_rank", lambda *args: seen.append(args) or 0)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["rank", "demo", "--socket", "/s", "--control-host", "10.0.0.1"]) == 0
    assert seen == [(EngineConfig(model="demo"), (1, 2, "mpi"), "/s", "10.0.0.1")]
    assert main(["rank", "demo", "--socket", "/s", "--rank", "0"]) == ExitCode.CONFIG


@pytest.mark.parametrize("config", ["{", "{}", '{"model": "other"}', '{"model": "demo", "max_num_seqs": "many"}'])
def test_rank_refuses_a_broken_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", "demo", "--socket", "/s", "--config", config]) == ExitCode.CONFIG
    assert "--config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--socket", "/s", "--rank", "x"], "--rank: 'x' is not a whole number, 0 or more"),
        (["--socket", "/s", "--rank", "-1"], "--rank: '-1' is not a whole number, 0 or more"),
        (["--sock", "/s"], "--socket"),
    ],
)
def test_rank_refuses_words_that_it_does_not_know(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "run_rank", lambda *args: 0)
    assert main(["rank", "demo", *words]) == 2
    assert message in capsys.readouterr().err


# generate --------------------------------------------------------------------------------------------------------


def test_generate_builds_the_apis_body(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def run(config: EngineConfig, body: Any, as_json: bool) -> int:
        seen.append((config, body, as_json))
        return 0

    monkeypatch.setattr(generate, "run", run)
    flags = ["--max-tokens", "5", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b", "--top-k", "3"]
    assert main(["generate", "m", "-p", "hi", "--system", "be brief", "--json", *flags]) == 0
    config, body, as_json = seen[0]
    assert (config.model, config.max_num_seqs, as_json) == ("m", 1, True)
    assert {name: value for name, value in asdict(body).items() if value is not None} == {
        "messages": [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi")],
        "max_tokens": 5, "temperature": 0.0, "seed": 7, "stop": ["a", "b"], "top_k": 3,
    }  # fmt: skip


def test_generate_raw_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def run(config: EngineConfig, body: Any, as_json: bool) -> int:
        seen.append(body.prompt)
        return 0

    monkeypatch.setattr(generate, "run", run)
    read, write = os.pipe()
    os.write(write, b"Once upon")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "--raw", "-p", "-"]) == 0
    assert seen == ["Once upon"]


def test_generate_refuses_a_system_message_without_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--raw", "--system", "s", "-p", "x"]) == ExitCode.CONFIG
    assert "--raw" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.main.importlib.import_module", interrupted)
    assert main(["serve"]) == main(["rank"]) == INTERRUPTED
