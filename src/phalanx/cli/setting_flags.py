"""Flags from settings: type, range, default, help and name of a flag are those of a field of a settings class; the help
is the docstring below the field.

A command takes a whole settings object, and `with_settings` gives the command line one flag per field of its class:

    @with_settings
    def command(config: Annotated[EngineConfig, Flags("model", "max_model_len", model="demo")]) -> int: ...

typer parses the flags and writes `--help`. The error of a bad value names the flag, the value and the allowed range.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import Meta, Struct
from typer.models import ArgumentInfo, OptionInfo

from phalanx.config import Flag
from phalanx.environment import api_keys_in, key_from_environment
from phalanx.errors import ConfigError
from phalanx.http.api_keys import NOT_SENDABLE, is_sendable
from phalanx.spec.parse_config import parse as parse_speculation

Info = ArgumentInfo | OptionInfo
T = TypeVar("T", bound=Struct)

REQUIRED = inspect.Parameter.empty


class Flags:
    """Which fields of a settings class a command offers as flags.

    Args:
        fields: names of the fields; none at all means every field.
        defaults: values without a flag, where the class has none or another one. A field that is named here but not in
            `fields` is fixed to this value.
    """

    def __init__(self, *fields: str, **defaults: object) -> None:
        self._fields = fields
        self.defaults = defaults

    def __contains__(self, name: str) -> bool:
        return name in self._fields or not self._fields


class Setting:
    """One field of a settings class, as it is declared. `text` is the docstring below it, on one line."""

    def __init__(self, field: msgspec.structs.FieldInfo, hint: Any, text: str) -> None:
        self.name = field.name
        self.text = text
        hint, metadata = _unwrap(hint)
        self.flag = next((entry for entry in metadata if isinstance(entry, Flag)), Flag())
        self.optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
        if self.optional:
            hint, inner = _unwrap(_without_none(hint))
            metadata += inner
        self.type: Any = hint
        self.range = next((entry for entry in metadata if isinstance(entry, Meta)), None)
        self.default: Any = REQUIRED
        """`REQUIRED` where the class has none."""
        if field.default_factory is not msgspec.NODEFAULT:
            self.default = field.default_factory()
        elif field.default is not msgspec.NODEFAULT:
            self.default = field.default

    @property
    def spelled(self) -> str:
        """The flag, for example `--max-model-len`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_nested(self) -> bool:
        """The field is a settings class itself, and always set: there is a flag for each of its fields."""
        return isinstance(self.type, type) and issubclass(self.type, Struct) and self.default is not None

    @property
    def is_list(self) -> bool:
        """The flag may be repeated."""
        return self.type in (tuple[str, ...], str | list[str])

    @property
    def is_counts(self) -> bool:
        """The flag's value is whole numbers, separated by commas."""
        return not self.is_list and any(get_origin(kind) is tuple for kind in (self.type, *get_args(self.type)))

    @property
    def is_json(self) -> bool:
        """The flag's value is JSON."""
        simple = self.is_list or self.is_counts or self.type in (int, float, str, bool)
        return not (simple or get_origin(self.type) is Literal)

    def parameter(self, default: Any) -> inspect.Parameter:
        """The annotation of a command's parameter for this setting; typer makes the flag of it.

        Args:
            default: the value without the flag, as the settings class has it.
        """
        base: Any = self._parsed_as()
        if self.is_list:
            base, default = list[str] | None, default or None
        elif self.is_json and default is not None:
            default = msgspec.json.encode(default).decode()
        annotation: Any = Annotated[base | None if self.optional else base, self.info(is_on=default is True)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def info(self, *, is_on: bool = False, **details: Any) -> Info:
        """The declaration in typer's terms.

        Args:
            is_on: the setting is a switch that is on by default, so that it needs a flag that turns it off.
            details: arguments of `typer.Option` that replace what is declared.
        """
        flag = self.flag
        declared = {"help": f"{self.text} Also {flag.variable}." if flag.variable else self.text, **self._parser()}
        if flag.metavar is not None:
            declared["metavar"] = flag.metavar
        if flag.default is not None:
            declared["show_default"] = flag.default
        if flag.positional:
            found = typer.Argument(**{**declared, **details})
        else:
            name = f"{self.spelled}/--no-{self.spelled[2:]}" if is_on else self.spelled
            found = typer.Option(name, *flag.aliases, **{"rich_help_panel": flag.panel, **declared, **details})
        assert isinstance(found, Info)
        return found

    def value(self, given: Any) -> Any:
        """The setting of what typer parsed.

        Raises:
            ConfigError: the text is not JSON of the setting's type.
        """
        if self.is_list:
            return tuple(given or ()) if self.type == tuple[str, ...] else given or None
        if self.is_json and given is not None:
            return JSON_PARSERS[self.name](given)
        return str(given) if isinstance(given, Path) else given

    def _parsed_as(self) -> Any:
        """The type that typer converts the text to."""
        return Path if self.flag.is_file else str if self.is_json or self.is_counts else self.type

    def _parser(self) -> dict[str, Any]:
        """Arguments of `typer.Option` that say how the text is checked."""
        if self.flag.is_file:
            return {"exists": True, "dir_okay": False, "readable": True}
        if self.is_json:
            return {"metavar": "JSON"}
        if self.is_counts:
            return {"parser": functools.partial(_counts, single=get_origin(self.type) is not tuple)}
        if self.range is None or self.range.ge is None:
            return {}
        return _ranged(int if self.type is int else float, self.range.ge, self.range.le)


@functools.cache
def settings_of(owner: type[Struct]) -> dict[str, Setting]:
    """The fields of a settings class, by name."""
    hints = get_type_hints(owner, include_extras=True)
    texts = _docstrings(owner)
    fields = msgspec.structs.fields(owner)
    return {field.name: Setting(field, hints[field.name], texts.get(field.name, "")) for field in fields}


def _docstrings(owner: type) -> dict[str, str]:
    """Field -> the docstring below it, on one line. Python keeps those of fields in the source only."""
    texts = {}
    try:
        file = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    except OSError:  # the package was installed without its source: flags have no help
        return {}
    written = next(node for node in file.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    for pair in pairwise(written.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def flag(owner: type[Struct], name: str, **details: Any) -> Info:
    """One field as a flag, for a command that takes it by itself: `port: Annotated[int, flag(ServerConfig, "port")]`.

    Args:
        details: arguments of `typer.Option` that replace what is declared.
    """
    return settings_of(owner)[name].info(**details)


def text_of(file: Path, flag: str) -> str:
    """The text in a file that a flag names.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file} is not UTF-8: {error}.", remedy="Write it as UTF-8.") from error


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command one flag per field for each of its parameters that is annotated with a class and `Flags`."""
    signature = inspect.signature(command, eval_str=True)
    build: dict[str, Callable[[Mapping[str, Any]], Struct]] = {}
    flags: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        owner, marks = _unwrap(parameter.annotation)
        if chosen := next((mark for mark in marks if isinstance(mark, Flags)), None):
            flags += parameters(owner, chosen)
            build[parameter.name] = functools.partial(build_settings, owner, chosen)
        else:
            flags.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> int:
        own = {name: value for name, value in given.items() if name in signature.parameters}
        return command(**own, **{name: builder(given) for name, builder in build.items()})

    run.__signature__ = signature.replace(parameters=flags)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def parameters(owner: type[Struct], chosen: Flags) -> Iterator[inspect.Parameter]:
    """One parameter per flag, in the order of the fields."""
    for name, setting in settings_of(owner).items():
        if setting.is_nested:
            yield from parameters(setting.type, chosen)
        elif name in chosen:
            yield setting.parameter(chosen.defaults.get(name, setting.default))
            if setting.flag.is_key:
                option = key_file(setting.spelled, rich_help_panel=setting.flag.panel)
                kind: Any = Annotated[Path | None, option]
                yield inspect.Parameter(_file_of(name), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def build_settings(owner: type[T], chosen: Flags, given: Mapping[str, Any]) -> T:
    """The settings object.

    Args:
        given: what typer parsed; more than the fields of `owner`, perhaps.

    Raises:
        ConfigError: a value is not JSON of its field's type; or as of `keys_of`.
    """
    values: dict[str, Any] = {}
    for name, setting in settings_of(owner).items():
        if setting.is_nested:
            values[name] = build_settings(setting.type, chosen, given)
        elif name in chosen and setting.flag.is_key:
            several, variable = setting.is_list, setting.flag.variable
            keys = keys_of(setting.spelled, given[name], given[_file_of(name)], variable, several=several)
            values[name] = keys if several else next(iter(keys), None)
        elif name in chosen:
            values[name] = setting.value(given[name])
        elif name in chosen.defaults:
            values[name] = chosen.defaults[name]
    return owner(**values)


def _without_none(union: Any) -> Any:
    """`A | B | None` as `A | B`."""
    return functools.reduce(operator.or_, (arg for arg in get_args(union) if arg is not NoneType))


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """`Annotated[T, ...]` as T and its metadata."""
    if get_origin(hint) is Annotated:
        base, *metadata = get_args(hint)
        return base, tuple(metadata)
    return hint, ()


# Keys ------------------------------------------------------------------------------------------------------------


def key_file(flag: str, **details: Any) -> Info:
    """The flag that names a file of a key, beside the flag of the key itself."""
    text = f"File with {flag}, alone on its line."
    found = typer.Option(f"{flag}-file", exists=True, dir_okay=False, readable=True, help=text, **details)
    assert isinstance(found, Info)
    return found


def keys_of(
    flag: str, given: str | Sequence[str] | None, file: Path | None, variable: str | None, *, several: bool
) -> tuple[str, ...]:
    """The keys of a flag and of the file that its second flag names; the variable counts where there are none.

    Args:
        several: there may be more than one: of flag and file together, and of the variable with blanks between them.

    Raises:
        ConfigError: there is one too many, none in the file or the variable, or one that no header can carry.
    """
    keys = [given] if isinstance(given, str) else list(given or ())
    if file is not None:
        if keys and not several:
            raise ConfigError(f"{flag} and {flag}-file are both given.", remedy="Give one of them.")
        found = api_keys_in(text_of(file, f"{flag}-file"))
        if not found or (len(found) > 1 and not several):
            raise ConfigError(f"{flag}-file {file} has {len(found) or 'no'} keys.", remedy="Write one key on a line.")
        keys += found
    if not keys and variable is not None and (value := key_from_environment(variable)) is not None:
        keys = value.split() if several else [value]
    if not all(is_sendable(key) for key in keys):
        others = "".join(f", {other}" for other in (f"{flag}-file", variable) if other is not None)
        raise ConfigError(f"A key ({flag}{others}) {NOT_SENDABLE}.", remedy="`openssl rand -hex 32` prints a good one.")
    return tuple(dict.fromkeys(keys))


def _file_of(name: str) -> str:
    """The name of the parameter beside that of a key."""
    return f"{name}_file"


# JSON ------------------------------------------------------------------------------------------------------------


def _template_variables(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (ValueError, RecursionError) as error:  # of msgspec, and of bytes that are not UTF-8
        raise ConfigError(
            f"--default-chat-template-kwargs {text[:80]!r} is not a JSON object: {error}.",
            remedy="""For example '{"enable_thinking": false}'.""",
        ) from error


JSON_PARSERS: dict[str, Callable[[str], Any]] = {
    "speculative_config": parse_speculation,
    "default_chat_template_kwargs": _template_variables,
}
"""Field -> how its flag's text is read."""


# Ranges ----------------------------------------------------------------------------------------------------------


def whole(low: int, high: int | None = None) -> dict[str, Any]:
    """For `typer.Option`: a whole number in a range. Errors say what was given and what is allowed."""
    return _ranged(int, low, high)


def number(low: float) -> dict[str, Any]:
    """As `whole`, for a finite number that is not too small."""
    return _ranged(float, low, None)


def _counts(given: object, *, single: bool) -> int | tuple[int, ...]:
    """Whole numbers, 1 or more, separated by commas.

    Args:
        single: returns one number alone as an int.
    """
    words = str(given).split(",")
    if not all(word.isascii() and word.isdigit() and int(word[:9]) > 0 for word in words):
        raise typer.BadParameter(f"{given!r} is not whole numbers, 1 or more, separated by commas.")
    numbers = tuple(int(word) for word in words)
    return numbers[0] if single and len(numbers) == 1 else numbers


def _ranged(kind: type[int] | type[float], low: float, high: float | None) -> dict[str, Any]:
    article = "a whole number" if kind is int else "a number"
    allowed = f"{article}, {low:g} or more" if high is None else f"{article}, {low:g} to {high:g}"

    def parse(given: str | float) -> float:
        try:
            value = kind(given)
        except ValueError:
            raise typer.BadParameter(f"{given!r} is not {allowed}.") from None
        if not (math.isfinite(value) and value >= low and (high is None or value <= high)):
            raise typer.BadParameter(f"{given} is not {allowed}.")
        return value

    return {"parser": parse, "metavar": "N" if kind is int else "X"}
