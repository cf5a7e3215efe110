"""Runs pip or uv, which fetch packages from the index that the user has set, and reports a failure in one line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from phalanx.environment import child_environment

FEW_RETRIES = {"PIP_RETRIES": "1", "UV_HTTP_RETRIES": "1"}
"""Where the user has not set them. With pip's own five, a machine without a network waits for eight seconds."""
BROKEN = re.compile(r"connection broken by '\w+\((.*)\)': ")
ERROR = re.compile("error: ", re.IGNORECASE)  # begins an installer's
ADVICE = re.compile(" (?:note|hint): ")  # begins what pip has to say on its own flags
NOTHING_FOUND = "No matching distribution found"
QUOTES = "\"'"
CHARS = 300  # of a reason


def run_installer(command: Sequence[str], temporary: str) -> str:
    """Run pip or uv. Returns why it failed; "" if it did not.

    Args:
        temporary: directory for what is downloaded and unpacked: /tmp may be small.
    """
    variables = {**FEW_RETRIES, **child_environment(), "TMPDIR": temporary}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=variables)
    return _reason(done.stderr, done.stdout) if done.returncode else ""


def _reason(stderr: str, stdout: str) -> str:
    """pip's last word is that it found nothing, whether the index lacks the package or cannot be reached."""
    lines = [line for line in f"{stdout}\n{stderr}".splitlines() if line.strip()] or ["no reason was given"]
    heads = [number for number, line in enumerate(lines) if ERROR.match(line)]
    text = ERROR.sub("", " ".join(" ".join(lines[heads[-1] if heads else -1 :]).split()), count=1)
    text = ADVICE.split(text)[0]
    broken = BROKEN.findall(stderr)
    if broken and NOTHING_FOUND in text:
        text = f"the package index cannot be reached: {_words(broken[-1])}"
    return text[:CHARS]


def _words(error: str) -> str:
    """An exception's text in pip's own line, without the connection that it names first."""
    return (error.partition("): ")[2] or error).strip(QUOTES)
