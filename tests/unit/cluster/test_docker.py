"""The Dockerfiles and the compose file fit together and the commands: stages, flags, variables, ports, names.

No docker has run them here; `e2e/test_installed_wheels.py` runs the steps that a machine without docker can.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from support.dockerfiles import FOLDER, first_stage, last_stage, words_of

from phalanx.cli.setting_flags import settings_of
from phalanx.config import DEFAULT_PORT, GATEWAY_PORT
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.server.settings.server_settings import ServerConfig
from tools.wheels import PURE

OWNERS = {"serve": ServerConfig, "gateway": GatewayConfig}
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_the_wheels_are_those_of_make_wheels():
    (pure,) = first_stage("gateway")["RUN"]
    assert pure == PURE[1].format(directory="/wheels", project="/src").replace("--no-build-isolation ", "")
    tools, kernels = first_stage("server")["RUN"]
    assert {"g++", "make"} <= set(tools.split())
    assert kernels == "make -C /src wheels DIST=/wheels PYTHONS=python"


@pytest.mark.parametrize(("name", "port"), [("server", DEFAULT_PORT), ("gateway", GATEWAY_PORT)])
def test_an_image_is_no_roots_and_asks_itself_for_its_health(name, port):
    stage = last_stage(name)
    assert stage["USER"] == ["65534:65534"]
    assert stage["EXPOSE"] == [str(port)]
    assert f"http://127.0.0.1:{port}/" in words_of(stage["HEALTHCHECK"][0])[-1]
    assert words_of(stage["ENTRYPOINT"][0]) == ["phalanx"]


def test_models_lie_in_the_volume():
    stage = last_stage("server")
    (volume,) = stage["VOLUME"]
    variables = dict(word.split("=") for word in stage["ENV"][0].split())
    assert all(value.startswith(volume) for value in variables.values())
    assert variables.keys() == {"HOME", "HF_HOME", "XDG_CACHE_HOME"}
    for service in SERVICES.values():
        for mounted in service.get("volumes", []):
            assert mounted.split(":")[1] == volume


@pytest.mark.parametrize("service", SERVICES)
def test_the_services_have_only_flags_and_variables_that_exist(service):
    command, *flags = SERVICES[service]["command"]
    known = settings_of(OWNERS[command])
    given = {word.removeprefix("--").partition("=")[0] for word in flags if word.startswith("--")}
    assert given <= {name.replace("_", "-") for name in known}
    assert set(SERVICES[service]["environment"]) <= {setting.flag.variable for setting in known.values()}
    assert not any("key" in word for word in flags)


def test_the_gateway_finds_the_servers_and_has_their_keys():
    gateway = SERVICES["gateway"]
    (urls,) = re.findall(r"--worker-urls=(\S+)", " ".join(gateway["command"]))
    servers = {name: service for name, service in SERVICES.items() if name != "gateway"}
    assert urls.split(",") == [f"http://{name}:{DEFAULT_PORT}" for name in servers]
    own = gateway["environment"]
    for name, server in servers.items():
        assert server["hostname"] == name  # a server refuses requests under other names
        for theirs, ours in (("API_KEY", "WORKER_KEY"), ("ADMIN_KEY", "WORKER_ADMIN_KEY")):
            asked, sent = server["environment"][f"PHALANX_{theirs}"], own[f"PHALANX_{ours}"]
            assert asked.partition(":")[0] == sent.partition(":")[0]
    assert gateway["ports"] == [f"{GATEWAY_PORT}:{GATEWAY_PORT}"]
