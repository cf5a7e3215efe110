"""`phalanx show`: describe a model."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.catalog.local_models import find
from phalanx.cli.list import day_of, fits_here, print_columns, size_of
from phalanx.errors import ExitCode


def command(
    model: Annotated[str, typer.Argument(help="A name of `phalanx list`, a hub id, a directory, or a GGUF file.")],
) -> int:
    """Describe a model that is on this machine."""
    found = find(model)
    rows = {
        "name": found.name,
        "repository": found.repository,
        "directory": str(found.path),
        "size": size_of(found.bytes),
        "family": found.family,
        "bits": found.bits,
        "context": str(found.context or ""),
        "last used": day_of(found.used),
        "fits here": fits_here(found),
        "lacks": found.lacks,
    }
    print_columns([[name, value] for name, value in rows.items() if value])
    return ExitCode.OK
