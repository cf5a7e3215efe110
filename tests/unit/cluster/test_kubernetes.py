"""The manifests are what Kubernetes takes, and fit together and the commands: names, ports, paths, flags, files.

No cluster has run them here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from phalanx.cli import gateway
from phalanx.cli.main import COMMANDS
from phalanx.cli.setting_flags import settings_of
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.replicas_file import parse_replicas

KUBERNETES = "1.37"
FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"


def load(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((FOLDER / name).read_text())}


@pytest.fixture
def objects() -> dict[str, Any]:
    return load("gateway.yaml")


@pytest.fixture
def container(objects: dict[str, Any]) -> dict[str, Any]:
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_every_object_says_what_it_is():
    for file in FOLDER.glob("*.yaml"):
        for found in yaml.safe_load_all(file.read_text()):
            assert found["apiVersion"] and found["kind"] and found["metadata"]["name"], file.name


def checkable(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What of an object Kubernetes has a schema for: all of it, but of a LeaderWorkerSet its pods alone."""
    if found["kind"] != "LeaderWorkerSet":
        yield found
        return
    group = found["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        metadata = {"name": f"{found['metadata']['name']}-{name.lower()}"}
        yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": group[name]}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_kubernetes_takes_them(file):
    n_checked = 0
    for found in yaml.safe_load_all(file.read_text()):
        for part in checkable(found):
            kubernetes_validate.validate(part, KUBERNETES, strict=True)
            n_checked += 1
    assert n_checked >= 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("readinessProbe", "periodSecond"), 5),
        (("ports", 0, "containerPort"), "http"),
        (("resources", "limits"), ["2Gi"]),
        (("securityContext", "runAsUsers"), 1),
    ],
)
def test_faults_are_found(objects, container, path, value):
    *parents, last = path
    for key in parents:
        container = container[key]
    container[last] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment"], KUBERNETES, strict=True)


def test_the_groups_have_only_fields_of_leader_worker_set():
    """As of its v1 API; no schema of it is at hand."""
    spec = load("vllm-group.yaml")["LeaderWorkerSet"]["spec"]
    assert spec.keys() <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    group = spec["leaderWorkerTemplate"]
    assert group.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert group["restartPolicy"] in ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart")


def test_the_command_and_its_flags_exist(container):
    assert container["command"] == ["phalanx", "gateway"] and "gateway" in COMMANDS
    given = dict(word.removeprefix("--").partition("=")[::2] for word in container["args"])
    known = {name.replace("_", "-") for name in settings_of(GatewayConfig)}
    assert set(given) <= known
    assert given["policy"] in str(settings_of(GatewayConfig)["policy"].type)
    assert gateway.command.__doc__
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(given["port"]), "metrics": int(given["prometheus-port"])}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(given[flag]).parent) for flag in ("replicas", "keys")} == mounted


def test_metrics_are_open_at_a_port_that_no_service_has_and_keys_stand_on_no_command_line(objects, container):
    assert "--metrics-open" in container["args"] and not any("worker-key" in word for word in container["args"])
    assert "metrics" not in {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
    (variable,) = container["env"]
    assert variable["name"] == settings_of(GatewayConfig)["worker_key"].flag.variable
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "phalanx-gateway", "key": "worker-key"}


def test_pods_are_found_probed_and_given_time(objects, container):
    spec = objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    (port,) = objects["Service"]["spec"]["ports"]
    names = {port["name"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")]
    assert {port["targetPort"], *(probe["port"] for probe in probes)} <= names
    assert [probe["path"] for probe in probes] == ["/version", "/health"]
    annotations = spec["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) in {port["containerPort"] for port in container["ports"]}
    (grace,) = (float(word.split("=")[1]) for word in container["args"] if "grace" in word)
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > grace


def test_volumes_are_those_that_are_mounted_and_none_is_a_sub_path(objects, container):
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == {mount["name"] for mount in container["volumeMounts"]}
    assert volumes[0]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    assert not any("subPath" in mount for mount in container["volumeMounts"])  # it would not follow changes


def test_the_replicas_are_the_leaders_of_the_groups(objects):
    specs = parse_replicas(objects["ConfigMap"]["data"]["replicas.toml"], "replicas.toml")
    groups = load("vllm-group.yaml")["LeaderWorkerSet"]
    name, template = groups["metadata"]["name"], groups["spec"]["leaderWorkerTemplate"]
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (port,) = leader["ports"]
    assert [spec.url for spec in specs] == [
        f"http://{name}-{i}.{name}:{port['containerPort']}" for i in range(groups["spec"]["replicas"])
    ]
    stages = re.search(r"--pipeline-parallel-size (\d+)", leader["args"][0])
    assert stages is not None and int(stages[1]) == template["size"]
    (variable,) = leader["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "phalanx-gateway", "key": "worker-key"}


def test_containers_may_do_nothing_but_serve(container):
    security = container["securityContext"]
    assert not security["allowPrivilegeEscalation"] and security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}
