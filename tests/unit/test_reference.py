"""Pages made from the code are what `make docs` writes, and nothing that they list is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from phalanx.cli.setting_flags import settings_of
from phalanx.config import EngineConfig
from phalanx.environment import OF_LAUNCHERS, VARIABLES
from phalanx.gateway.dispatch.dispatcher import Dispatcher
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.settings.server_settings import ServerConfig
from tools import reference
from tools.pictures import REQUEST

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_pages_are_current(pages: dict[str, str]) -> None:
    stale = [path for path, text in pages.items() if (ROOT / path).read_text() != text]
    assert not stale, f"run `make docs`: {stale}"
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/reference").iterdir()}
    assert written == {path for path in pages if path.startswith("docs/reference/")}


def test_the_drawn_request_has_the_steps_of_the_page() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## Life of a request")[2].partition("\n## ")[0]
    _, messages = REQUEST
    drawn = [match[1].strip() for message in messages if (match := re.match(r"(\d [\w ]+)", message.text))]
    assert list(dict.fromkeys(drawn)) == [
        f"{number} {name.lower()}" for number, name in re.findall(r"^(\d)\. \*\*(.*?)\.\*\*", page, re.M)
    ]


def test_every_variable_that_is_read_is_described() -> None:
    tree = ast.parse((ROOT / "src/phalanx/environment.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = {text for text in texts if NAME.fullmatch(text) and not text.startswith(OF_LAUNCHERS)}
    for source in (ROOT / "native").rglob("*.cpp"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', source.read_text()))
    for owner in (EngineConfig, ServerConfig, GatewayConfig):
        read |= {setting.flag.variable for setting in settings_of(owner).values() if setting.flag.variable}
    assert {"PHALANX_API_KEY", "KERN_ISA"} <= read
    assert read - set(VARIABLES) - {"PHALANX_"} == set()


def test_every_flag_of_a_server_and_a_gateway_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/flags.md"]
    for command, owners in (("serve", (EngineConfig, ServerConfig)), ("gateway", (GatewayConfig,))):
        section = page.partition(f"## phalanx {command}\n")[2].partition("\n## ")[0]
        settings = [setting for owner in owners for setting in settings_of(owner).values() if not setting.is_nested]
        assert len(settings) > 20
        for setting in settings:
            assert setting.flag.positional or f"`{setting.spelled}`" in section, setting.name


def test_every_endpoint_and_field_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/endpoints.md"]
    described = reference.openapi_of_server()
    paths = [*described["paths"].items(), *reference.openapi_of_gateway()["paths"].items()]
    for method, path in {(method.upper(), path) for path, methods in paths for method in methods}:
        assert f"| {method} | `{path}` |" in page
    for name, schema in described["components"]["schemas"].items():
        section = page.partition(f"### {name}\n")[2].partition("\n##")[0]
        assert name.endswith("Error") or all(f"| `{field}` |" in section for field in schema["properties"]), name


def test_every_metric_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/metrics.md"]
    gateway = GatewayMetrics(Dispatcher.__new__(Dispatcher))
    for registry, least in ((ServerMetrics("model").registry, 30), (gateway.registry, 14)):
        helped = re.findall(r"^# HELP (\S+) (.*)$", generate_latest(registry).decode(), re.M)
        metrics = [(name, text) for name, text in helped if not name.endswith("_created")]
        assert len(metrics) >= least
        for name, text in metrics:
            assert re.search(rf"^\| `{re.escape(name)}` \| \w+ \| .*\| {re.escape(text)} \|$", page, re.M), name
