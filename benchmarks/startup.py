"""Seconds from the command to the first streamed token over HTTP, of this installation and of another one.

A start is mostly imports, then reading weights, checking them and the first prompt. All of it is processor time, so a
busy neighbour lengthens every start: with `--beside`, the two installations take turns, and their ratio is the result.

    python benchmarks/startup.py demo --tp 2 --runs 5
    python benchmarks/startup.py path/to/model --beside ../other/.venv/bin/python

Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.01  # between attempts to be served
LONGEST_S = 120.0
QUESTION = "What is the capital of France?"


def main() -> None:
    options = _options()
    pythons = {"this": sys.executable} | ({"other": options.beside} if options.beside else {})
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    for python in pythons.values():  # the first start reads files that later ones find in memory
        first_token(python, options.model, options.tp)
    for _ in range(options.runs):
        for name, python in pythons.items():
            seconds[name].append(first_token(python, options.model, options.tp))
    medians = {name: round(statistics.median(values), 2) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)} s, median {medians[name]:.2f} s")
    ratio = round(medians["other"] / medians["this"], 2) if options.beside else None
    about = {"benchmark": "startup", "model": options.model, "tp": options.tp, "median_s": medians, "ratio": ratio}
    print(json.dumps(about))


def first_token(python: str, model: str, tp: int) -> float:
    """Start a server, send a request as soon as it accepts one, and end it. Returns seconds until the first text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "phalanx", "serve", model, "--tp", str(tp), "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    began = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _answers(port, model):
            if server.poll() is not None or time.perf_counter() - began > LONGEST_S:
                raise SystemExit(f"no answer; run it by hand: {' '.join(command)}")
            time.sleep(POLL_S)
        return time.perf_counter() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _answers(port: int, model: str) -> bool:
    """Request an answer. Returns whether its first text arrived; False before the engine is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    message = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [message], "stream": True, "max_tokens": 8, "temperature": 0}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            return False
        while line := response.readline():
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                if choices and choices[0]["delta"].get("content"):
                    return True
    except OSError:
        pass
    finally:
        connection.close()
    return False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="`demo`, or a model's directory")
    parser.add_argument("--tp", type=int, default=1, help="ranks (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="starts of each installation (default: %(default)s)")
    parser.add_argument("--beside", type=_python, help="the Python interpreter of another installation")
    return parser.parse_args()


def _python(text: str) -> str:
    return str(Path(text).absolute())


if __name__ == "__main__":
    main()
