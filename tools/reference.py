"""Writes what is made from the code: `docs/reference/`, `docs/errors.md`, and the diagrams (`tools/pictures.py`).

    make docs

`tests/unit/test_reference.py` fails while a page is not what this writes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer.main
from msgspec import Struct
from prometheus_client import CollectorRegistry

from phalanx import errors, faults
from phalanx.cli.main import COMMANDS, HIDDEN
from phalanx.cli.typer_app import build
from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.dist import frames, peers, stage_frames
from phalanx.environment import VARIABLES
from phalanx.errors import ExitCode, PhalanxError, exit_code_of
from phalanx.gateway.dispatch.dispatcher import Dispatcher
from phalanx.gateway.gateway_app import App
from phalanx.gateway.gateway_overview import GatewayOverview
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.http import openapi
from phalanx.http.application import Application
from phalanx.http.error_responses import STATUS, Failure, messages_error
from phalanx.rank_variables import ALLOWED
from phalanx.server.dialects.ollama import ollama_models
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.server_app import create_app
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.fake_engine import FakeEngine
from phalanx.text.tokenizer import Tokenizer
from tools.pictures import pictures

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "phalanx"
MADE = "Made from the code by `make docs`; not to be edited by hand.\n"

Row = tuple[str, ...]


def pages() -> dict[str, str]:
    """Path of each page, from the root -> its text."""
    return {
        "docs/reference/flags.md": flags(),
        "docs/reference/environment.md": variables(),
        "docs/reference/metrics.md": metrics(),
        "docs/reference/endpoints.md": endpoints(),
        "docs/reference/error-codes.md": error_codes(),
        "docs/reference/protocols.md": protocols(),
        "docs/errors.md": faults.markdown(),
        **pictures(),
    }


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)


# Markdown --------------------------------------------------------------------------------------------------------


def page(title: str, *parts: str) -> str:
    return "\n".join([f"# {title}\n", MADE, *parts])


def table(columns: Row, rows: Iterable[Row]) -> str:
    lines = [line_of(columns), "|" + "---|" * len(columns), *(line_of(row) for row in rows)]
    return "\n".join(lines) + "\n"


def line_of(row: Row) -> str:
    return "".join(f"| {cell(text)} " for text in row) + "|"


def cell(text: str) -> str:
    """Text for a cell of a table: on one line, without what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def first_sentence(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0]


# Flags -----------------------------------------------------------------------------------------------------------


def flags() -> str:
    parts = [
        "Each line is what `phalanx COMMAND --help` says. `[x]` in a value means that it may be left out; a flag that "
        "may be\nrepeated says so. Flags behind the first `--` of `up` are those of `serve`, behind the second those "
        "of `gateway`.\n"
    ]
    for name in (name for name in COMMANDS if name not in HIDDEN):
        group: Any = typer.main.get_command(build(name, COMMANDS, HIDDEN))
        command = group.commands[name]
        parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        rows = [(flag_of(each), code(value_of(each)), default_of(each), each.help or "") for each in parameters]
        parts.append(f"## phalanx {name}\n\n{command.help.strip()}\n")
        parts.append(table(("flag", "value", "default", "what it does"), rows))
    return page("Flags", *parts)


def flag_of(parameter: Any) -> str:
    """How it is written: `--port`, `--tp`; an argument by its name in capitals."""
    if parameter.param_type_name == "argument":
        return code(parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]")
    return ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))


def value_of(parameter: Any) -> str:
    """What stands behind the flag; "" where nothing does."""
    if getattr(parameter, "is_flag", False):
        return ""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    annotation = parameter.type_descriptor.annotation
    if typing.get_origin(annotation) is Literal:
        return "|".join(typing.get_args(annotation))
    return {int: "N", float: "X", Path: "FILE"}.get(annotation, "TEXT")


def default_of(parameter: Any) -> str:
    """What counts without the flag."""
    if parameter.required:
        return "(required)"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.default in (None, False, "", []) or callable(parameter.default):
        return ""
    if parameter.default is True:
        return "on"
    return code(str(parameter.default))


# Environment -----------------------------------------------------------------------------------------------------


def variables() -> str:
    return page(
        "Environment variables",
        table(("variable", "what it does"), ((code(name), text) for name, text in VARIABLES.items())),
        "## Variables that may be set for ranks\n",
        "By `envs` in a hostfile and by `--env` of `phalanx up`; `*` stands for any rest. Names with a word that means "
        "a file, a\ndirectory or a program are refused all the same ([why](../clusters.md#variables-of-ranks)).\n",
        table(("of", "variables"), ((rule.reason, ", ".join(map(code, rule.names))) for rule in ALLOWED)),
    )


# Metrics ---------------------------------------------------------------------------------------------------------


def metrics() -> str:
    dispatcher = Dispatcher.__new__(Dispatcher)  # the metrics read it only when they are asked for
    columns = ("metric", "type", "labels", "what it counts")
    return page(
        "Metrics",
        "In Prometheus' text format. A counter's name ends with `_total`, a histogram has `_bucket`, `_sum` and "
        "`_count`.\nWhere there are keys, `/metrics` needs one, unless `--metrics-open`.\n",
        "## Of a server: `GET /metrics`\n",
        table(columns, metrics_of(ServerMetrics("model").registry)),
        "## Of a gateway: `GET /metrics`\n",
        table(columns, metrics_of(GatewayMetrics(dispatcher).registry)),
    )


def metrics_of(registry: CollectorRegistry) -> Iterator[Row]:
    for collector in registry._collector_to_names:  # the registry lists its metrics' labels nowhere else
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = getattr(collector, "_labelnames", ())
            yield code(name), family.type, ", ".join(map(code, labels)), family.documentation


# Endpoints -------------------------------------------------------------------------------------------------------

DIALECTS = (
    ("OpenAI: chat and text completions, models", r"/v1/(chat/completions|completions|models.*)"),
    ("OpenAI: Responses", r"/v1/responses.*"),
    ("Anthropic: Messages", r"/v1/messages.*"),
    ("Ollama", r"/api/.*"),
    ("vLLM: tokens and prefixes", r"/(tokenize|detokenize|tokenizer_info|reset_prefix_cache)"),
    ("Refused: models that compute no text", r".*/?(embeddings|rerank|score|pooling|classify)"),
    ("Health, metrics, descriptions", r".*"),
)
"""Heading -> the paths below it: each stands where it fits first."""


def endpoints() -> str:
    server, gateway = openapi_of_server(), openapi_of_gateway()
    parts = [
        "What `GET /openapi.json` says of a server, by dialect; what differs from each API: [dialects](../dialects.md)."
        "\nA field that is null counts as absent. A *strict* body with a field that is not listed is refused with a "
        "400 that\nnames the field; other bodies pass over such fields, which clients of their APIs add every month.\n"
    ]
    left = dict(server["paths"])
    written: set[str] = set()
    for heading, pattern in DIALECTS:
        here = {path: left.pop(path) for path in list(left) if re.fullmatch(pattern, path)}
        parts += [f"## {heading}\n", table(("method", "path", "key", "what it does"), operations_of(here))]
        for name in bodies_of(here, server["components"]["schemas"]):
            if name not in written:
                written.add(name)
                parts += fields_of(name, server["components"]["schemas"][name])
    parts += ["## Gateway\n", table(("method", "path", "key", "what it does"), operations_of(gateway["paths"]))]
    for name in bodies_of(gateway["paths"], gateway["components"]["schemas"]):
        parts += fields_of(name, gateway["components"]["schemas"][name])
    return page("Endpoints", *parts)


def openapi_of_server() -> dict[str, Any]:
    """The description that a server gives of itself."""
    config = ServerConfig(engine=EngineConfig(model="demo"))
    return described_by(create_app(config, FakeEngine(), Tokenizer.load(MODEL_DIR)).application)


def openapi_of_gateway() -> dict[str, Any]:
    """That of a gateway with an admin API. What would answer its other requests is not there."""
    others: list[Any] = [None] * 6
    hosts: Any = None
    overview = GatewayOverview(*others[:5], admin_key="key", policy="")
    app = App(*others, overview, admin_key="key", aliases={}, hosts=hosts, serves_metrics=True, metrics_open=False)
    return described_by(app.application)


def described_by(application: Application) -> dict[str, Any]:
    route, _ = application.router.find("GET", "/openapi.json")
    answer: Any = asyncio.run(route.handler(None))  # type: ignore[arg-type]  # the answer is the same to all
    described: dict[str, Any] = msgspec.json.decode(answer.body)
    return described


def operations_of(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for path, methods in paths.items():
        for method, described in methods.items():
            yield method.upper(), code(path), "yes" if described.get("security") else "", described["summary"]


def bodies_of(paths: Mapping[str, Mapping[str, Any]], schemas: Mapping[str, Any]) -> list[str]:
    """Names of the bodies that are read at these paths, each before those inside it."""
    found: list[str] = []
    todo = [
        name
        for methods in paths.values()
        for described in methods.values()
        for name in references(described.get("requestBody"))
    ]
    while todo:
        name = todo.pop(0)
        if name not in found:
            found.append(name)
            todo = references(schemas[name]) + todo
    return found


def references(schema: Any) -> list[str]:
    """Names of schemas that one refers to, in their order."""
    return re.findall(r'"#/components/schemas/(\w+)"', msgspec.json.encode(schema).decode())


def fields_of(name: str, schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", ())
    rows = [
        (code(field), kind_of(each), "yes" if field in required else "", described(each))
        for field, each in schema["properties"].items()
    ]
    strict = "Strict.\n" if schema.get("additionalProperties") is False else "Not strict.\n"
    return [f"### {name}\n", strict, table(("field", "type", "required", "meaning"), rows)]


def described(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description", ""))


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type of a field and its range, in words, without null."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [kind_of(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        inner = kind_of(schema["items"]) if schema.get("items") else "any"
        kind = f"list of {inner}"
    return " ".join([kind, *(text.format(schema[key]) for key, text in BOUNDS.items() if key in schema)])


BOUNDS = {
    "minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}",
    "maxLength": "of at most {} characters", "maxItems": "of at most {} entries",
}  # fmt: skip


# Errors ----------------------------------------------------------------------------------------------------------


def error_codes() -> str:
    return page(
        "Errors and their codes",
        "Errors that log lines and ssh show, with causes and remedies: [known faults](../errors.md).\n",
        "## HTTP\n",
        'OpenAI\'s form is `{"error": {"message", "type", "param", "code"}}`, Anthropic\'s\n'
        '`{"type": "error", "error": {"type", "message"}}`, Ollama\'s `{"error": message}`. A subclass '
        "that is not listed has\nthe line of its base.\n",
        table(("status", "OpenAI's type", "code", "Anthropic's type", "error", "when"), http_rows()),
        "An error may have a code of its own: " + ",\n".join(map(code, own_codes())) + ".\n",
        "## Exit codes\n",
        "Of ranks and commands. `phalanx doctor` has its own: 0 all is well, 10 warnings, 20 something is wrong.\n",
        table(("exit code", "name", "a restart can help", "errors"), exit_rows()),
    )


def http_rows() -> Iterator[Row]:
    for kind, status in sorted(STATUS.items(), key=lambda entry: entry[1].status):
        failure = Failure(status=status.status, type=status.type, message="")
        anthropic = messages_error(failure)["error"]["type"]
        text = first_sentence(kind.__doc__)
        yield str(status.status), code(status.type), code(status.code or ""), code(anthropic), kind.__name__, text


def own_codes() -> list[str]:
    """The codes that are given to errors where they are raised."""
    texts = (file.read_text() for file in sorted(SOURCE.rglob("*.py")))
    return sorted({found for text in texts for found in re.findall(r'\bcode="(\w+)"', text)})


def exit_rows() -> Iterator[Row]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PhalanxError)]
    for number in ExitCode:
        raised = ", ".join(kind.__name__ for kind in kinds if exit_code_of(kind.__new__(kind)) is number)
        helps = "yes" if number.restart_helps else ""
        yield str(number.value), number.name, helps, "all others" if number is ExitCode.CRASH else raised


# Protocols -------------------------------------------------------------------------------------------------------


class Protocol(Struct, frozen=True):
    """What two processes speak, possibly of two releases."""

    between: str
    what: str
    version: str
    differs: str  # what happens where the versions are not the same


def protocols() -> str:
    rows = [
        Protocol("all sockets of phalanx", "frames: version byte, length, payload (`dist/frames.py`)",
                 str(frames.VERSION), "the connection ends with a FrameError"),
        Protocol("ranks of a group", "control messages: plans, heartbeats, reports (`dist/peers.py`)",
                 str(peers.PROTOCOL), "the leader refuses the rank and names both"),
        Protocol("pipeline stages", "hidden states with checksums (`dist/stage_frames.py`)",
                 stage_frames.MAGIC.decode(), "StageLinkError: frames of another version arrive"),
        Protocol("server and leader; server and agents; `phalanx` here and on hosts",
                 "msgpack, JSON (`supervision/wire.py`, `supervision/programs.py`, `cluster/host_verbs.py`)",
                 "the release's", "`up` and `doctor` name a host with another release"),
        Protocol("gateway and server", "records of streams that may move (`http/stream_records.py`)",
                 "`determinism_key` of `/health`", "a stream goes on exactly only where it is equal"),
        Protocol("clients of Ollama and server", "Ollama's API (`server/dialects/ollama/`)",
                 ollama_models.API_VERSION, "clients ask `/api/version`"),
        Protocol("clients and server, gateway", "OpenAPI description at `/openapi.json`", openapi.VERSION, ""),
    ]  # fmt: skip
    return page(
        "Versions of protocols",
        "Ranks of one group need the same release of phalanx, mlx and mlx-lm; gateway and servers may be of different "
        "ones\n([upgrade](../deployment.md#upgrade)).\n",
        table(
            ("between", "what", "version", "if versions differ"),
            ((row.between, row.what, row.version, row.differs) for row in rows),
        ),
    )


if __name__ == "__main__":
    main()
