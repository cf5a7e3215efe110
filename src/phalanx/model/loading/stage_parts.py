"""Bytes and costs of a model's parts, for sharing its layers out among stages.

`python -m phalanx.model.loading.stage_parts DIRECTORY` prints it as JSON, from headers alone, for programs that do not
import MLX; where the model cannot be cut, it says why on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from phalanx.dist.topology import LayerCost, Parts
from phalanx.errors import PhalanxError
from phalanx.model.loading.load import prepare
from phalanx.model.loading.stage_cut import LayerCosts


def parts_of(costs: LayerCosts) -> Parts:
    """The parts of a model.

    A token's time grows with the bytes that it reads, few of them an embedding's. A chunk's time grows with its
    arithmetic, in which the head has no part.
    """
    return Parts(
        embedding=LayerCost(split=costs.before),
        layers=tuple(
            LayerCost(split=weights, cost=weights, chunk_cost=elements)
            for weights, elements in zip(costs.weights, costs.elements, strict=True)
        ),
        head=LayerCost(split=costs.behind, cost=costs.behind),
        everywhere=LayerCost(split=0, whole=costs.everywhere),
    )


def read_parts(path: Path) -> Parts:
    """The parts of the model in a directory.

    Raises:
        ModelUnsupported: mlx-lm does not know it, or it cannot be cut.
        WeightsError: its files are damaged.
    """
    found: list[LayerCosts] = []

    def all_layers(costs: LayerCosts) -> tuple[int, int]:
        found.append(costs)
        return 0, len(costs.weights)

    prepare(path, dtype="auto", trust_remote_code=False, choose_layers=all_layers)
    return parts_of(found[0])


if __name__ == "__main__":
    try:
        print(msgspec.json.encode(read_parts(Path(sys.argv[1]))).decode())
    except PhalanxError as error:
        sys.exit(str(error))
