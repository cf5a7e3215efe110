"""What TLS costs on a control connection: round trips between a leader and a worker, and tokens of two ranks.

A step sends each worker one plan and waits for no answer, so a round trip is more than a step's part. The same two
processes use a Unix socket, plain TCP and TLS over TCP in alternating blocks: neighbours disturb all three alike. Then
two groups of two ranks answer in turns: one started by phalanx (Unix socket), one by mpirun (TLS). The demo model's
step is the shortest there is, so that the share of the control connection is the largest.

    python benchmarks/control.py [--blocks 60] [--bytes 400] [--rounds 30]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from servers import DEMO, MODEL_NAME, phalanx

from phalanx.cli.private import PrivateServer
from phalanx.config import GroupConfig
from phalanx.dist import control_address
from phalanx.dist.backend import environment_of, mpirun_command
from phalanx.dist.channel import LeaderChannel, WorkerChannel
from phalanx.dist.peers import Identity
from phalanx.dist.ports import free_ports
from phalanx.tls.certificates import make_credentials
from phalanx.tls.credentials import Credentials, read_credentials, write_credentials

BLOCK = 200  # round trips
WARM = 3  # blocks before measuring
REPORT = bytes(100)
WAIT_S = 60.0
KINDS = ("unix", "tcp", "tls")
TOKENS = 256  # of an answer
GROUP = ("--threads", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    parser.add_argument("--bytes", type=int, default=400, help="of a plan; 400 are those of a few decoding rows")
    parser.add_argument("--rounds", type=int, default=30, help="answers of each group")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker[0]), read_credentials(Path(options.worker[1])))
        return 0
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        results = measure(Path(directory), options.blocks, bytes(options.bytes))
    for kind, figures in results.items():
        print(f"{kind}: {figures['median_us']:.0f} us a round trip, {figures['cpu_us']:.0f} us of leader's processor")
    tokens = compare(options.rounds)
    print(f"a token: {tokens['unix_ms']:.3f} ms over a Unix socket, {tokens['tls_ms']:.3f} over TLS")
    print(json.dumps({"benchmark": "control", "bytes": options.bytes, "kinds": results, "tokens": tokens}))
    return 0


def measure(directory: Path, blocks: int, plan: bytes) -> dict[str, dict[str, float]]:
    """Figures by kind of connection."""
    own, workers = make_credentials(["leader", "worker"])
    write_credentials(directory / "worker.json", workers)
    ports = free_ports(2)
    controls = dict(zip(KINDS, (str(directory / "control"), *(f"127.0.0.1:{port}" for port in ports)), strict=True))
    listeners = {kind: control_address.listen(control) for kind, control in controls.items()}
    command = [sys.executable, __file__, "--worker", json.dumps(controls), str(directory / "worker.json")]
    with subprocess.Popen(command):
        leaders = {}
        for kind, control in controls.items():
            leaders[kind] = LeaderChannel(listeners[kind], meeting(control), credentials(kind, own), identity(0))
            leaders[kind].gather()
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(WARM + blocks):
            for kind in KINDS if turn % 2 else reversed(KINDS):
                cpu, started = time.process_time(), time.perf_counter()
                for _ in range(BLOCK):
                    leaders[kind].broadcast(plan)
                    leaders[kind].collect(WAIT_S)
                if turn >= WARM:
                    times[kind].append(1e6 * (time.perf_counter() - started) / BLOCK)
                    spent[kind].append(1e6 * (time.process_time() - cpu) / BLOCK)
        for leader in leaders.values():
            leader.close("done")
    return {
        kind: {"median_us": statistics.median(times[kind]), "cpu_us": statistics.median(spent[kind])} for kind in KINDS
    }


def compare(rounds: int) -> dict[str, Any]:
    """Milliseconds per token of both groups, and quartiles of what TLS adds, as a share."""
    times: dict[str, list[float]] = {"unix": [], "tls": []}
    with phalanx(DEMO, *GROUP, "--tp", "2", "--backend", "mpi") as own, attached() as launched:
        urls = {"unix": own, "tls": launched}
        for turn in range(WARM + rounds):
            for kind in urls if turn % 2 else reversed(urls):
                seconds = answer(urls[kind])
                if turn >= WARM:
                    times[kind].append(1e3 * seconds / TOKENS)
    shares = [tls / unix - 1.0 for tls, unix in zip(times["tls"], times["unix"], strict=True)]
    medians = {f"{kind}_ms": statistics.median(values) for kind, values in times.items()}
    return {**medians, "added": statistics.quantiles(shares, n=4)}


@contextmanager
def attached() -> Iterator[str]:
    """A server whose two ranks mpirun has started; yields its base URL."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        line = Path(directory) / "engine.sock"
        server = PrivateServer(str(DEMO), ["--port", "0", "--served-model-name", MODEL_NAME, "--attach", str(line)])
        while not line.exists():
            time.sleep(0.05)
        config = json.dumps({"model": str(DEMO), "threads": 1})
        rank = [sys.executable, "-m", "phalanx", "rank", str(DEMO), "--socket", str(line), "--config", config]
        environment = {**os.environ, **environment_of("mpi", None, None)}
        with subprocess.Popen(mpirun_command(2, "auto", rank), env=environment, stderr=subprocess.DEVNULL):
            try:
                server.wait_ready(lambda line: None)
                yield server.url
            finally:
                server.stop()


def answer(url: str) -> float:
    """Seconds of one answer."""
    body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    httpx.post(f"{url}/completions", json=body, timeout=WAIT_S).raise_for_status()
    return time.perf_counter() - started


def work(controls: dict[str, str], own: Credentials) -> None:
    """The worker: answers every plan, on each connection in a thread of its own."""

    def answer(channel: WorkerChannel) -> None:
        while channel.receive() is not None:
            channel.send(REPORT)
        channel.close("done")

    threads = []
    for kind, control in controls.items():
        channel = WorkerChannel.connect(meeting(control), credentials(kind, own), identity(1))
        threads.append(threading.Thread(target=answer, args=(channel,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def credentials(kind: str, own: Credentials) -> Credentials | None:
    return own if kind == "tls" else None


def meeting(control: str) -> GroupConfig:
    return GroupConfig(size=2, backend="ring", nonce=1, control=control)


def identity(rank: int) -> Identity:
    return Identity(rank=rank, pid=0, host="here", version="", mlx="", mlx_lm="", python="", device="")


if __name__ == "__main__":
    sys.exit(main())
