"""Flags from declarations: every field's range, default and text, and commands that take a part of a class."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import py_compile
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from phalanx.cli.setting_flags import Flags, Setting, flag, settings_of, with_settings
from phalanx.config import Dtype, EngineConfig, Flag
from phalanx.errors import ConfigError
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.offline.sampling_params import SamplingParams
from phalanx.server.settings.server_settings import ServerConfig

Level = Annotated[int, Meta(ge=1, le=8)]


class Inner(Struct, frozen=True, kw_only=True):
    name: Annotated[str, Flag(positional=True)]
    """Who."""
    level: Annotated[Level, Flag("Engine", aliases=("-l",))] = 3
    """How much."""
    share: Annotated[Annotated[float, Meta(ge=0.0)] | None, Flag(default="all of it")] = None
    """How far."""


class Outer(Struct, frozen=True, kw_only=True):
    inner: Inner
    words: Annotated[tuple[str, ...], Flag()] = ()
    on: Annotated[bool, Flag(variable="SOME_VARIABLE")] = True
    """On,
    and not off."""
    off: Annotated[bool, Flag()] = False
    file: Annotated[str | None, Flag(is_file=True)] = None


def parsed(command: Any, *words: str) -> Any:
    """What a command made of settings receives."""
    seen: list[Any] = []

    def keep(**values: Any) -> int:
        seen.append(values)
        return 0

    keep.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(with_settings(keep))
    app(list(words), standalone_mode=False)
    return seen[0]


def whole_class(config: Annotated[Outer, Flags(name="n", level=5)], extra: int = 0) -> int:
    """All fields, one default replaced, and a parameter of the command's own."""
    return 0


def part(config: Annotated[Inner, Flags("share", name="fixed", level=7)]) -> int:
    """One flag; the other fields are fixed."""
    return 0


def test_a_nested_class_gives_its_fields_and_its_object() -> None:
    assert parsed(whole_class) == {"config": Outer(inner=Inner(name="n", level=5)), "extra": 0}
    found = parsed(whole_class, "m", "-l", "8", "--no-on", "--off", "--words", "a", "--words", "b", "--extra", "4")
    inner = Inner(name="m", level=8)
    assert found == {"config": Outer(inner=inner, words=("a", "b"), on=False, off=True), "extra": 4}


def test_a_part_of_a_class_has_only_its_flags() -> None:
    assert parsed(part, "--share", "0.5") == {"config": Inner(name="fixed", level=7, share=0.5)}
    with pytest.raises(Exception, match="--level"):
        parsed(part, "--level", "2")


def test_a_field_without_default_is_required() -> None:
    def command(config: Annotated[Inner, Flags()]) -> int:
        """Nothing is given."""
        return 0

    with pytest.raises(Exception, match="name"):
        parsed(command)


def test_a_file_has_to_exist(tmp_path: Any) -> None:
    path = tmp_path / "a"
    with pytest.raises(Exception, match="does not exist"):
        parsed(whole_class, "--file", str(path))
    path.write_text("")
    assert parsed(whole_class, "--file", str(path))["config"].file == str(path)


def test_the_help_is_the_docstring_and_names_the_variable_and_the_words_for_a_default() -> None:
    assert settings_of(Outer)["on"].info().help == "On, and not off. Also SOME_VARIABLE."
    assert settings_of(Outer)["off"].info().help == ""
    assert settings_of(Inner)["share"].info().show_default == "all of it"
    assert flag(Inner, "level", help="Other.", rich_help_panel=None).help == "Other."


def test_a_package_without_its_source_has_flags_without_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "compiled_alone.py"
    written.write_text('from msgspec import Struct\nclass Bare(Struct):\n    level: int = 3\n    """How much."""\n')
    py_compile.compile(str(written), str(tmp_path / "compiled_alone.pyc"))
    written.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    level = settings_of(importlib.import_module("compiled_alone").Bare)["level"]
    assert (level.spelled, level.default, level.info().help) == ("--level", 3, "")


def test_json_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a JSON object"):
        settings_of(ServerConfig)["default_chat_template_kwargs"].value("[")
    assert settings_of(ServerConfig)["default_chat_template_kwargs"].value('{"a": 1}') == {"a": 1}


RANGED = [
    setting
    for owner in (EngineConfig, ServerConfig, SamplingParams)
    for setting in settings_of(owner).values()
    if setting.range is not None
]


@pytest.mark.parametrize("setting", RANGED, ids=lambda setting: setting.name)
@settings(max_examples=20)
@given(data=st.data())
def test_every_number_of_a_range_is_taken_and_no_other(setting: Setting, data: st.DataObject) -> None:
    bounds = setting.range
    assert bounds is not None
    low, high = bounds.ge, bounds.le
    assert low is not None
    numbers = st.integers(-(1 << 40), 1 << 40) if setting.type is int else st.floats()
    value = data.draw(numbers)
    parse = setting.info().parser
    assert parse is not None
    if math.isfinite(value) and low <= value and (high is None or value <= high):
        assert parse(str(value)) == value
        return
    with pytest.raises(typer.BadParameter) as refused:
        parse(str(value))
    assert str(value) in refused.value.message
    assert f"{low:g}" in refused.value.message


@pytest.mark.parametrize("owner", [EngineConfig, ServerConfig, GatewayConfig, SamplingParams])
def test_every_setting_has_a_text_for_help(owner: type[Struct]) -> None:
    assert not [name for name, one in settings_of(owner).items() if not one.text and not one.is_nested]


@settings(max_examples=20)
@given(
    rows=st.integers(1, 4096), gb=st.none() | st.floats(0, 1e6), kernels=st.booleans(),
    dtype=st.sampled_from(get_args(Dtype)),
    variables=st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text(max_size=5), max_size=3),
)  # fmt: skip
def test_a_config_survives_being_written_as_flags(
    rows: int, gb: float | None, kernels: bool, dtype: Any, variables: dict[str, object]
) -> None:
    def command(config: Annotated[ServerConfig, Flags(model="demo")]) -> int:
        """As `serve`."""
        return 0

    words = ["--max-num-seqs", str(rows), "--dtype", dtype, "--cpu-kernels" if kernels else "--no-cpu-kernels"]
    words += [] if gb is None else ["--kv-cache-gb", repr(gb)]
    words += ["--default-chat-template-kwargs", json.dumps(variables)]
    engine = EngineConfig(model="demo", max_num_seqs=rows, kv_cache_gb=gb, cpu_kernels=kernels, dtype=dtype)
    expected = ServerConfig(engine=engine, default_chat_template_kwargs=variables)
    assert parsed(command, *words) == {"config": expected}
