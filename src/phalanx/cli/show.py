"""`phalanx show`: describe a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.catalog.imports import ORIGIN, origin_of, source_of
from phalanx.catalog.local_models import directory_of, find
from phalanx.cli.list import day_of, fits_here, print_columns, size_of
from phalanx.errors import ExitCode
from phalanx.model.loading.resolve import preview


def command(
    model: Annotated[str, typer.Argument(help="A name of `phalanx list`, a hub id, a directory, or a GGUF file.")],
) -> int:
    """Describe a model that is on this machine."""
    file = Path(model).expanduser()
    is_new = file.is_file() and directory_of(model) is None
    found = preview(file) if is_new else find(model)
    rows = {
        "name": found.name,
        "repository": found.repository,
        "file" if is_new else "directory": str(found.path),
        "size": size_of(found.bytes),
        "family": found.family,
        "bits": found.bits,
        "context": str(found.context or ""),
        "last used": day_of(found.used),
        "fits here": fits_here(found),
        "lacks": found.lacks,
        **_origin(found.path),
        "imported": f"not yet: phalanx pull {model}" if is_new else "",
    }
    print_columns([[name, value] for name, value in rows.items() if value])
    return ExitCode.OK


def _origin(path: Path) -> dict[str, str]:
    """The file that a model was imported from, and the cost of the import."""
    origin = origin_of(path)
    if origin is None:
        return {}
    found = {"imported from": source_of(path)}
    if errors := origin.requantised:
        worst = max(errors, key=lambda name: errors[name])
        found["requantised"] = f"{len(errors)} tensors, to 8 bits; the largest error is {errors[worst]:.2g} ({worst})"
        found["every error"] = str(path / ORIGIN)
    return found
