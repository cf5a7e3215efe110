"""Downloads a model from the hub into the hub's cache, and explains failures.

The hub's client asks and retries. Here is what it leaves out: the disk is measured first; a file goes on where a killed
download stopped, and gets no more bytes than the hub says that it has; each is compared with the checksum that the hub
names before it gets its name; the snapshot's directory comes last, so that no part of a model bears the model's name.

The hub may be a mirror that lies (HF_ENDPOINT). Its names and checksums become paths, so malformed ones are
refused. The client's own download trusts a header (ETag) with the path of a file, and so is not used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub import errors as hub
from huggingface_hub.file_download import _create_symlink, http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers, filter_repo_objects
from huggingface_hub.utils import tqdm as hub_bar

from phalanx.catalog.gguf_names import split_quant
from phalanx.catalog.local_models import NEEDED, PART, cached_snapshot, directory_of, lacking, repository_folder
from phalanx.catalog.pull_progress import ASKING, PullProgress, Report, quiet
from phalanx.catalog.short_names import PACKAGED, did_you_mean
from phalanx.errors import ModelError, ModelNotFound
from phalanx.memory import GB

HTTP_ERROR: type[Exception] = hub.HfHubHTTPError.__bases__[0]
"""Base of all errors of HTTP that the hub's client raises: it has changed the library below, and may again."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPARE = 64 << 20  # bytes of the disk that stay free
SHA1 = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
NO_NAMES = frozenset(("", ".", ".."))  # between the slashes of a file's name
NO_LIST = (AssertionError, AttributeError, LookupError, RecursionError, TypeError)
"""Errors of the hub's client where an answer is JSON of another kind."""
MAX_QUOTED = 500  # characters of an error of the client, which quotes the hub


class Listing(NamedTuple):
    """The files of a repository, as the hub lists them."""

    repository: str
    quant: str  # of a GGUF file, as the name has it; "" if it has none
    revision: str | None
    commit: str
    files: Sequence[Any]

    @property
    def is_gguf(self) -> bool:
        """Whether the name means a GGUF file: it says so, or the repository has no other weights."""
        names = [file.rfilename for file in self.files]
        has_weights = any(fnmatchcase(name, NEEDED[0]) for name in names)
        return self.quant != "" or (not has_weights and any(name.endswith(".gguf") for name in names))


def ask(model: str, revision: str | None, report: Report = quiet) -> Listing | Path:
    """The hub's list of a model's files; if the hub cannot be asked, the model's directory on this machine.

    Args:
        model: a hub id, with or without a colon and the quantisation of a GGUF file.

    Raises:
        ModelNotFound: says whether the repository, the permission or the network is at fault, or that this machine
            has only a part of the model.
        ModelError: the list is none.
    """
    repository, quant = split_quant(model)
    report(PullProgress(ASKING))
    try:
        found = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except (HTTP_ERROR, OSError, ValueError, *NO_LIST) as error:
        if isinstance(error, (hub.HFValidationError, hub.RevisionNotFoundError)):
            raise explain(model, revision, error) from error
        return _from_cache(model, revision, error)
    return Listing(repository, quant, revision, found.sha, _checked_list(repository, found))


def _from_cache(model: str, revision: str | None, error: Exception) -> Path:
    path = directory_of(model, revision)
    if path is None:
        raise explain(model, revision, error) from error
    if missing := lacking(path):
        raise ModelNotFound(
            f"The download of {model} is incomplete: {path} lacks {missing}, and the hub cannot be asked for it.",
            remedy=f"Run `phalanx pull {model}` where the hub can be reached.",
        ) from error
    return path


def download(listing: Listing, *, trust_remote_code: bool, report: Report = quiet) -> Path:
    """The directory of a model in the hub's cache, with all of its files that the cache lacks.

    Raises:
        ModelNotFound: says whether the permission or the network is at fault.
        ModelError: the disk is too small, or a file is not what the hub says.
    """
    patterns = [pattern for pattern in NEEDED if trust_remote_code or not pattern.endswith(".py")]
    with _explained(listing):
        return _fetch(listing, patterns, report)


@contextmanager
def _explained(listing: Listing) -> Iterator[None]:
    try:
        yield
    except (HTTP_ERROR, OSError, ValueError) as error:
        raise explain(listing.repository, listing.revision, error) from error


def _fetch(listing: Listing, patterns: Sequence[str], report: Report) -> Path:
    """Fetch the files that the cache lacks, then give them their names; those of weights last."""
    model, revision, commit = listing.repository, listing.revision, listing.commit
    folder = repository_folder(model)
    snapshot: Path = folder / "snapshots" / commit
    names = set(filter_repo_objects([file.rfilename for file in listing.files], allow_patterns=list(patterns)))
    todo = [file for file in listing.files if file.rfilename in names and not (snapshot / file.rfilename).exists()]
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"{model} has no weights as safetensors.", remedy="Choose another repository, such as of mlx-community."
        )
    if todo:
        _check_disk(model, folder, todo, report)
    for file in sorted(todo, key=lambda file: file.lfs is None):  # the large ones first
        lock = folder.parent / ".locks" / folder.name / f"{digest_of(file)}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            _fetch_file(listing, file, folder / "blobs" / digest_of(file), report)
    for file in sorted(todo, key=lambda file: str(file.rfilename).endswith(".safetensors")):
        link: Path = snapshot / file.rfilename
        link.parent.mkdir(parents=True, exist_ok=True)
        _create_symlink(str(folder / "blobs" / digest_of(file)), str(link), new_blob=True)
    is_named = not todo and cached_snapshot(model, revision) == snapshot  # the cache may be read-only
    if revision != commit and not is_named:
        ref = folder / "refs" / (revision or constants.DEFAULT_REVISION)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot


def _checked_list(model: str, found: Any) -> list[Any]:
    """The files of a repository; their names and checksums become paths.

    Raises:
        ModelError: the commit, or a file's name, checksum or size is none.
    """
    wrong = [] if SHA1.fullmatch(str(found.sha)) else [f"the commit {found.sha}"]
    listed = list(found.siblings or ())
    for file in listed:
        is_name = isinstance(file.rfilename, str) and NO_NAMES.isdisjoint(file.rfilename.split("/"))
        is_size = isinstance(file.size, int) and file.size >= 0
        is_sum = (SHA1 if file.lfs is None else SHA256).fullmatch(str(digest_of(file)))
        if not (is_name and is_size and is_sum and "\0" not in file.rfilename):
            wrong.append(f"the file {file.rfilename} with {file.size} bytes and the checksum {digest_of(file)}")
    if wrong:
        raise ModelError(
            f"The hub's list of {model} has what no repository has: {wrong[0][:MAX_QUOTED]!r}.",
            remedy="Check HF_ENDPOINT, if it is set: this is not the answer of a model hub.",
        )
    return listed


def digest_of(file: Any) -> str:
    """The checksum by which the cache names a file: SHA-256 of the large ones, git's of the others."""
    return str(file.blob_id if file.lfs is None else file.lfs.sha256)


def _check_disk(model: str, folder: Path, todo: Sequence[Any], report: Report) -> None:
    """Report how many bytes are left to download.

    Raises:
        ModelError: the disk has too few.
    """
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    needed = 0
    for file in todo:
        have = [blobs / digest_of(file), blobs / f"{digest_of(file)}{PART}"]
        needed += max(0, file.size - sum(one.stat().st_size for one in have if one.exists()))
    free = shutil.disk_usage(blobs).free
    if needed + SPARE > free:
        raise ModelError(
            f"{model} needs {needed / GB:.2f} GiB of disk, but {folder.parent} has {free / GB:.2f} GiB free.",
            remedy="Remove models (`phalanx list`, `phalanx rm NAME`), or set HF_HUB_CACHE to a directory with room.",
        )
    report(PullProgress(f"needs {needed / GB:.2f} GiB of disk, {free / GB:.2f} GiB are free"))


def fetch(listing: Listing, file: Any, target: Path, report: Report, most: int | None = None) -> Path:
    """Fetch a file, or the rest of it, to a place outside of the cache; one that the cache has is linked.

    Args:
        most: bytes; about so many of the beginning are enough, and are not verified.

    Returns:
        `target`, or the file of a part.

    Raises:
        ModelError: as `download`.
    """
    cached = repository_folder(listing.repository) / "blobs" / digest_of(file)
    with _explained(listing):
        if not target.exists() and cached.is_file():
            target.symlink_to(cached.resolve())
        part = target.with_name(f"{target.name}{PART}")
        if most is None or most >= file.size:
            _fetch_file(listing, file, target, report)
        elif not target.exists():
            _fetch_bytes(listing, file, part, most, report)
            return part
    return target


def _fetch_file(listing: Listing, file: Any, target: Path, report: Report) -> None:
    """Fetch a file, or the rest of it, into a directory.

    Raises:
        ModelError: what came is not what the hub says.
    """
    if target.exists():
        return
    part = target.with_name(f"{target.name}{PART}")
    _fetch_bytes(listing, file, part, file.size, report)
    if file.lfs is not None:
        report(PullProgress("verifying sha256 digest"))
    if _checksum(part, file.size, is_large=file.lfs is not None) != digest_of(file):
        part.unlink()
        raise _changed(listing.repository, file.rfilename)
    part.replace(target)


def _fetch_bytes(listing: Listing, file: Any, part: Path, size: int, report: Report) -> None:
    """Fetch the beginning of a file of at most so many bytes, or the rest of it."""
    bar = NoBar if file.lfs is None and report is not quiet else _bar(report, digest_of(file), file.size)
    with PartOfFile(part, size) as out:
        if out.tell() > file.size:
            out.truncate(0)
        if size < file.size and out.tell() + constants.DOWNLOAD_CHUNK_SIZE > size:
            return  # no more would be taken in
        with suppress(TooLong):
            http_get(
                hf_hub_url(listing.repository, file.rfilename, revision=listing.commit), out, resume_size=out.tell(),
                headers=build_hf_headers(), expected_size=file.size if size == file.size else None, tqdm_class=bar,
            )  # fmt: skip
        out.flush()
        os.fsync(out.fileno())


class TooLong(Exception):
    """More bytes came than a file has."""


class PartOfFile(io.BufferedWriter):
    """A file that is being fetched: however much a hub sends, it does not fill the disk.

    Args:
        size: in bytes, as the hub says.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._size = size

    def write(self, data: Any) -> int:
        """Take in bytes.

        Raises:
            TooLong: these are more than the file has.
        """
        if self.tell() + len(data) > self._size:
            raise TooLong
        return super().write(data)


class NoBar(hub_bar):  # type: ignore[misc]  # of a module without types
    """A bar of the hub's client that is not drawn."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "disable": True})


def _bar(report: Report, digest: str, total: int) -> type | None:
    """A class for the hub's client in place of its progress bar, which reports; None: the client draws its own."""
    if report is quiet:
        return None

    class Bar:
        def __init__(self, initial: int = 0, **_: Any) -> None:
            self.completed = initial
            self.update(0)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.completed += int(n or 0)
            report(PullProgress(f"pulling {digest[:12]}", f"sha256:{digest}", total, self.completed))

    return Bar


def _changed(model: str, name: str) -> ModelError:
    return ModelError(
        f"{name} of {model} is not what the hub says: its checksum is another.",
        remedy="It changed while it was read, or something on the way changes files: try again.",
    )


def _checksum(file: Path, size: int, *, is_large: bool) -> str:
    """SHA-256 of a file, or what git names one of this size by."""
    with file.open("rb") as stream:
        if is_large:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        named = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: named).hexdigest()


def explain(model: str, revision: str | None, error: Exception) -> ModelError:
    """Map an error of the hub's client. Specific errors come first, because some are subclasses of others."""
    no_directory = f"There is no directory {model!r}, and"
    match error:
        case hub.HFValidationError():
            return ModelNotFound(
                f"{no_directory} it is not a hub id.",
                remedy=f"{did_you_mean(model)}Give a directory, owner/name, `demo`, or a short name such as "
                f"`{PACKAGED}`.",
            )
        case hub.GatedRepoError():
            return ModelNotFound(
                f"{model} is a gated repository of the hub and this machine has no access to it.",
                remedy="Accept its terms on its page at the hub, then log in with `hf auth login` (or set HF_TOKEN).",
            )
        case hub.RepositoryNotFoundError():
            return ModelNotFound(
                f"{no_directory} the hub has no such repository (or it is private).",
                remedy=f"{did_you_mean(model)}Check the name; for a private one log in with `hf auth login` (or set "
                "HF_TOKEN).",
            )
        case hub.RevisionNotFoundError():
            return ModelNotFound(f"{model} has no revision {revision!r}.", remedy="Check --revision.")
        case hub.HfHubHTTPError() if error.response.status_code == 401:
            return ModelNotFound(
                f"The hub does not accept this machine's token for {model}.",
                remedy="Log in again with `hf auth login`, or set HF_TOKEN.",
            )
        case OSError(errno=number) if number in FULL:
            return ModelError(
                f"{model} could not be written: {error.strerror}.",
                remedy="Make room (`phalanx list`, `phalanx rm NAME`) and pull again: it goes on where it stopped.",
            )
    if isinstance(error, (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError)) or (
        isinstance(error, HTTP_ERROR) and not isinstance(error, hub.HfHubHTTPError)
    ):
        return ModelNotFound(
            f"{model} is neither a directory nor in the hub's cache here, and the hub cannot be reached.",
            remedy=f"{did_you_mean(model)}Check the network, or copy the model to a directory and give its path; "
            f"`{PACKAGED}` needs no hub.",
        )
    text = " ".join(str(error).split())[:MAX_QUOTED]
    of_file = isinstance(error, OSError) and isinstance(error.filename, str)
    return ModelNotFound(
        f"{model} could not be fetched from the hub: {type(error).__name__}: {text}",
        remedy="Make it writable for this user, or set HF_HOME to another directory."
        if of_file
        else "Try again later, or copy the model to a directory and give its path.",
    )
