"""Fetches the files that planning needs before a model is downloaded: the small ones, and the headers of weights.

Headers are fetched by range. Each file of weights is written as long as the hub says, with nothing behind its header,
which takes no room on the disk: whatever reads headers finds a complete model, whose weights are zero.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from phalanx.catalog.hub import HTTP_ERROR, Listing, NoBar, PartOfFile, TooLong, ask, explain, fetch
from phalanx.catalog.local_models import NEEDED
from phalanx.environment import cache_dir
from phalanx.errors import ModelError

SMALL = ("config.json", "*.safetensors.index.json", "generation_config.json")
WEIGHTS = NEEDED[0]
TOKENIZER = "tokenizer.json"  # only its size counts
GUESS = 1 << 17  # bytes of a file's beginning; most headers end before
MAX_HEADER = 32 << 20  # bytes, as where weights are loaded


def headers_of(model: str) -> Path:
    """A directory of the model without its weights; its own one if it is on this machine.

    Raises:
        ModelNotFound: says whether the repository, the permission or the network is at fault.
        ModelError: it has no weights as safetensors, or the hub's answer has no safetensors header.
    """
    listing = ask(model, None)
    if isinstance(listing, Path):
        return listing
    files = [file for file in listing.files if "/" not in file.rfilename]
    weights = [file for file in files if fnmatchcase(file.rfilename, WEIGHTS)]
    if not weights:
        raise ModelError(
            f"{model} has no safetensors, whose headers can be read before a download.",
            remedy=f"Run `phalanx pull {model}`, then plan again.",
        )
    folder = cache_dir() / "headers" / f"{listing.repository.replace('/', '--')}-{listing.commit}"
    small = [file for file in files if any(fnmatchcase(file.rfilename, pattern) for pattern in SMALL)]
    if folder.is_dir():
        if all((folder / file.rfilename).exists() for file in small):
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # its links dangle: the model was deleted from the hub's cache
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix=".begun-", dir=folder.parent))
    try:
        for file in small:
            fetch(listing, file, begun / file.rfilename, lambda _: None)
        for size in [file.size for file in files if file.rfilename == TOKENIZER]:
            with (begun / TOKENIZER).open("wb") as out:
                out.truncate(size)
        for file in weights:
            _fetch_header(listing, file, begun / file.rfilename)
        begun.rename(folder)
    except (HTTP_ERROR, OSError, ValueError) as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise explain(listing.repository, listing.revision, error) from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return folder


def _fetch_header(listing: Listing, file: Any, target: Path) -> None:
    """Write a file of weights without its weights."""
    _fetch_beginning(listing, file, target, min(GUESS, file.size))
    with target.open("rb") as stream:
        start = stream.read(8)
    length = 8 + struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 8 < length <= min(MAX_HEADER, file.size):
        raise ModelError(
            f"{file.rfilename} of {listing.repository} does not begin with a header of safetensors.",
            remedy="Check HF_ENDPOINT, if it is set: it must answer requests for a range of bytes.",
        )
    if length > GUESS:
        _fetch_beginning(listing, file, target, length)
    os.truncate(target, length)
    os.truncate(target, file.size)


def _fetch_beginning(listing: Listing, file: Any, target: Path, size: int) -> None:
    """Write the first `size` bytes of a file, or none if the hub sends more than was asked for at once."""
    target.unlink(missing_ok=True)
    headers = {**build_hf_headers(), "range": f"bytes=0-{size - 1}"}
    with PartOfFile(target, size) as out:
        try:
            http_get(
                hf_hub_url(listing.repository, file.rfilename, revision=listing.commit), out, headers=headers,
                expected_size=size, tqdm_class=NoBar,
            )  # fmt: skip
        except TooLong:
            out.truncate(0)
