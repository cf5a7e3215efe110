"""Starts the two servers of a comparison, as users start them, and makes the models that they serve."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from phalanx.cli.private import PrivateServer, free_port

MODEL_NAME = "default_model"  # mlx_lm.server's name for the model it was started with; ours is told to use it, too
START_S = 300.0
DEMO = Path(__file__).resolve().parent.parent / "src" / "phalanx" / "demo" / "model"
NEVER_SAID = "<|system|>"  # a token the demo model does not write


@contextmanager
def phalanx(model: Path, *flags: str) -> Iterator[str]:
    """Run phalanx's server with default settings and these flags; yields its base URL."""
    server = PrivateServer(str(model), ["--port", "0", "--served-model-name", MODEL_NAME, *flags])
    try:
        server.wait_ready(lambda line: None)
        yield server.url
    finally:
        code = server.stop()
    if code != 0:
        raise RuntimeError(f"phalanx ended with status {code}; see {server.log}")


@contextmanager
def mlx_lm(model: Path, log: Path, *flags: str, ranks: int = 1) -> Iterator[str]:
    """Run mlx_lm.server with default settings (up to 32 rows per batch) and these flags; yields its base URL.

    With several ranks under `mlx.launch`, on a ring (its default).
    """
    port = next(port for port in range(18080, 18180) if free_port(port))
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), *flags]
    if ranks > 1:
        launcher = Path(sys.executable).with_name("mlx.launch")
        command = [str(launcher), "-n", str(ranks), "--backend", "ring", "--", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--log-level", "WARNING"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mlx_lm.server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        ranks_left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for rank in ranks_left:  # mlx.launch leaves its ranks when it is terminated
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


def endless_demo(directory: Path) -> Path:
    """The demo model with another EOS, so that answers have the requested length on both servers."""
    path = directory / "demo-endless"
    shutil.copytree(DEMO, path, dirs_exist_ok=True)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == NEVER_SAID)
    for name, changes in (
        ("tokenizer_config.json", {"eos_token": NEVER_SAID}),
        ("config.json", {"eos_token_id": end}),
        ("generation_config.json", {"eos_token_id": end}),
    ):
        settings = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**settings, **changes}))
    return path


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
