"""Help at 80 columns, and words that a command does not take: where they belong, and what does the same here."""

from __future__ import annotations

import re

import pytest

from phalanx.cli.command_line import check_serve_words, serve_flags
from phalanx.cli.foreign_flags import FOREIGN_FLAGS
from phalanx.cli.main import COMMANDS, HIDDEN, main
from phalanx.errors import ExitCode


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_every_flag_of_serve_whole(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", flag]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))
    assert serve_flags() <= shown | {spelled.replace("--", "--no-", 1) for spelled in shown}
    assert "--tp" in shown
    assert not re.search(r"-$", text, re.MULTILINE), "no flag is broken at a hyphen"
    assert "\nMemory:\n" in text and "\nRanks:\n" in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in HIDDEN | {"serve"}])
def test_help_of_every_command_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "-h"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hosts.json", "qwen3:4b"], "`phalanx up HOSTFILE -- qwen3:4b`"),
        (["hosts.json", "--tp", "2", "--", "demo"], "stands after `--`: `phalanx up HOSTFILE -- MODEL --tp"),
        (["--max-model-len=9", "hosts.json"], "stands after `--`: `phalanx up HOSTFILE -- MODEL --max-model-len"),
        (["hosts.json", "--model", "demo"], "`phalanx up HOSTFILE -- MODEL`"),
        (["--hosts", "a,b", "x", "y"], "'y' is one argument too many"),
        (["qwen3:4b", "--hosts", "a,b"], "`phalanx up HOSTFILE -- qwen3:4b`"),
        (["qwen3:4b"], "`phalanx up HOSTFILE -- qwen3:4b`"),
        (["--timeot", "3"], "Did you mean --timeout?"),
        (["studio1"], "`--hosts studio1`"),
    ],
)
def test_words_of_up_that_belong_after_two_dashes(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *words]) in (ExitCode.USAGE, ExitCode.CONFIG)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--gpu-memory-utilization", "0.9"], "--kv-cache-gb says"),
        (["demo", "--max-model-le=9"], "Did you mean --max-model-len?"),
        (["demo", "--qqq"], "`phalanx serve --help`"),
    ],
)
def test_flags_after_two_dashes_are_checked_before_a_host_is_asked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--hosts", "a,b", "--", *words]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert "after `--`: `phalanx serve` has no such flag." in told and said in told


def test_every_flag_of_serve_may_stand_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    names = " ".join(re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE))
    flags = re.findall(r"--?[a-z][a-z0-9-]*", names)
    assert len(flags) > len(serve_flags())
    for flag in flags:
        check_serve_words(["demo", flag, "1"])
    check_serve_words(["demo", "--api-key", "--odd-key", "--queue=3", "--metrics-open", "-tp", "2"])


@pytest.mark.parametrize("word", ["--wor", "--word", "--stop-on-eo"])
@pytest.mark.parametrize("command", ["up", "serve"])
def test_no_internal_flag_is_suggested(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, word]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "--stop-on-eof" not in said and "Did you mean --word" not in said


@pytest.mark.parametrize("words", [["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization=0.9"]])
def test_a_flag_of_vllm_is_answered_with_ours(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "has no flag --gpu-memory-utilization" in said and "--kv-cache-gb" in said


def test_hints_name_flags_that_serve_has() -> None:
    assert not serve_flags() & set(FOREIGN_FLAGS)
    named = set(re.findall(r"--[a-z][a-z-]*", " ".join(FOREIGN_FLAGS.values())))
    assert named <= serve_flags() | {"--replicas"}


@pytest.mark.parametrize("words", [["gateway", "--policy", "random"], ["serve", "--log-level", "random"]])
def test_a_wrong_choice_is_told_the_right_ones_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"Invalid value for '{words[1]}': 'random' is not one of '" in said


def test_a_number_of_replicas_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--replicas", "2"]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "file '2' does not exist." in said
    assert "--worker-urls takes their addresses, and `phalanx up --replicas N` starts N of them." in said


def test_values_that_look_like_flags_are_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "--gpu", "--seed", "x"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "--gpu" not in said and "'--seed'" in said


def test_words_after_two_dashes_are_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--", "--odd-name"]) != 0
    assert "--odd-name is not on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "demo", "two words"], "`phalanx generate MODEL -p 'two words'`"),
        (["gateway", "http://a:8000"], "`phalanx gateway --worker-urls http://a:8000`"),
        (["model", "pull", "hosts.json", "demo"], "`phalanx model pull MODEL --hostfile FILE`"),
        (["stop", "8000", "8001"], "`phalanx stop --help`"),
    ],
)
def test_an_argument_too_many_is_told_where_it_belongs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert f"{words[-1]!r} is one argument too many." in told and said in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "demo", "-p", "8000"], "`phalanx serve` has no flag -p.\n  Did you mean --port?"),
        (["serve", "demo", "-c", "4096"], "`phalanx serve` has no flag -c.\n  Did you mean --max-model-len"),
        (["serve", "-m", "demo"], "`phalanx serve` has no flag -m.\n  The model is an argument"),
        (["top", "--url", "http://a"], "no flag --url.\n  The address is an argument: `phalanx top http://HOST:PORT`."),
        (["chat", "--url=http://a"], "no flag --url.\n  The address is an argument: `phalanx chat http://HOST:PORT`."),
        (["logs", "hosts.json", "-q"], "`phalanx logs` has no flag -q.\n  `phalanx logs --help` shows all flags."),
    ],
)
def test_a_short_flag_of_another_program_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--api-key", "--max-model-len", "-tp"])
def test_a_last_flag_without_its_value_is_refused_before_a_host_is_asked(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--hosts", "a,b", "--", "demo", flag]) == ExitCode.CONFIG
    assert f"{flag} after `--` has no value." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--verify-restores"], ["--prefix-cache-disk-gb=10"]])
def test_flags_for_prefixes_on_disk_need_a_directory_before_a_host_is_asked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--hosts", "a,b", "--", "demo", *words]) == ExitCode.CONFIG
    assert "is for prefixes on disk, and there is no --prefix-cache-dir.\n  Add" in capsys.readouterr().err


def test_a_hostfile_that_is_not_there_is_taken_for_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "no-such-hosts.json"]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert "The hostfile no-such-hosts.json cannot be read" in told and "--hosts" not in told and "A model" not in told
