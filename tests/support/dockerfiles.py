"""What a Dockerfile says, for tests on machines without docker."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "docker"


def last_stage(name: str) -> dict[str, list[str]]:
    """Instruction -> what stands behind each, of the stage that becomes the image, as `docker build` reads them."""
    return _stages(name)[-1]


def first_stage(name: str) -> dict[str, list[str]]:
    """As `last_stage`, of the stage that builds the wheels."""
    return _stages(name)[0]


def words_of(instruction: str) -> list[str]:
    """The words of a command that stands as a JSON array, behind options."""
    found: list[str] = json.loads(instruction[instruction.index("[") :])
    return found


def _stages(name: str) -> list[dict[str, list[str]]]:
    stages: list[dict[str, list[str]]] = []
    for line in (FOLDER / f"{name}.Dockerfile").read_text().replace("\\\n", "").splitlines():
        instruction, _, rest = line.partition(" ")
        if not line or instruction == "#":
            continue
        if instruction == "FROM":
            stages.append({})
        stages[-1].setdefault(instruction, []).append(rest)
    return stages
