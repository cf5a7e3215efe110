"""Imports a GGUF model of the hub: downloads its files into the folder of the import, which goes on where it stopped.

The downloaded files are deleted once the model is imported: together they would take more than twice the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.catalog import hub
from phalanx.catalog.gguf_names import choose_files, stem_of
from phalanx.catalog.imports import Origin
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError, ModelNotFound, ModelUnsupported, WeightsError
from phalanx.memory import GB
from phalanx.model.gguf.gguf_import import check_disk, convert
from phalanx.model.gguf.import_once import SOURCE, check_files, content_of, explained, import_once

BEGINNING = 64 << 20  # bytes of a file, with room for its header: the largest known vocabularies take some 20 MB


def import_from_hub(listing: hub.Listing, report: Report = quiet) -> Path:
    """The directory of a model that the hub has as GGUF; downloaded and imported unless it has been before.

    Raises:
        ModelNotFound: the repository has no such quantisation; names those it has. Or the network is at fault.
        ModelError: the model is not taken over, the disk is too small, or a file is not what the hub says.
    """
    label, names = choose_files(listing.repository, listing.quant, [file.rfilename for file in listing.files])
    by_name = {file.rfilename: file for file in listing.files}
    for name in names:
        if name not in by_name:
            raise ModelNotFound(f"{listing.repository} lacks {name}.", remedy="Choose another quantisation.")
    files = [by_name[name] for name in names]
    origin = Origin(sha256=content_of([hub.digest_of(file) for file in files]), hub=f"{listing.repository}:{label}")

    def build(folder: Path) -> Mapping[str, float]:
        try:
            return _build(listing, files, origin.hub, folder, report)
        except (WeightsError, ModelUnsupported) as error:
            place = f"{folder / SOURCE}/"
            raise type(error)(error.message.replace(place, f"{origin.hub}: "), remedy=error.remedy) from error

    with explained(origin.hub):
        return import_once(stem_of(Path(names[0]).name), origin, (), build, report)


def _build(listing: hub.Listing, files: list[Any], name: str, folder: Path, report: Report) -> Mapping[str, float]:
    """Download what is missing, and convert it. Refuses what cannot be imported by the beginnings of the files."""
    source = folder / SOURCE
    source.mkdir(exist_ok=True)
    places = [source / Path(file.rfilename).name for file in files]
    begun = [hub.fetch(listing, file, place, report, BEGINNING) for file, place in zip(files, places, strict=True)]
    sizes = [file.size for file in files]
    needed = sum(sizes) + check_files(begun, sizes)
    have = sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))
    try:
        check_disk(name, needed - have, folder.parent)
    except ModelError:
        if all(file.stat().st_size <= BEGINNING for file in begun):
            shutil.rmtree(source)  # not worth to be gone on with
        raise
    report(PullProgress(f"needs {max(0, needed - have) / GB:.2f} GB of disk, for the file and what is made of it"))
    for file, place in zip(files, places, strict=True):
        hub.fetch(listing, file, place, report)
    return convert(places[0], folder, report)
