"""Copies a model from this machine to hosts (`model push`): asks which files each lacks, sends them by ssh, verifies.

Serves hosts in parallel, each through one connection. `file_transfer.py` is the hosts' side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from phalanx.catalog.local_models import directory_of, repository_in
from phalanx.cluster.file_transfer import BLOCK, Inventory, Manifest, ModelFile, ReceivedFile, manifest, missing_shards
from phalanx.cluster.ssh import TEXT_CHARS, Remote, failure, run
from phalanx.environment import hub_cache
from phalanx.errors import ClusterError, ModelNotFound
from phalanx.memory import GB
from phalanx.text.printable import printable, shortened

VERIFY_S = 3600.0  # enough to read a terabyte
PART_S = 60.0  # and per GB: for a host to verify files, the last block of one included

Progress = Callable[[str, int], None]
"""Called with a host and the number of bytes that it received since the last call."""


def prepare(model: str, progress: Callable[[int], None] = lambda _: None, *, needed: bool = False) -> Manifest:
    """The manifest of a model on this machine: all its files, or (`needed`) only those that serving reads.

    Raises:
        ModelNotFound: the model is not on this machine, or not complete.
    """
    path = directory_of(model)
    if path is None:
        raise ModelNotFound(
            f"{model} is not on this machine.", remedy=f"Run `phalanx model pull {model}`, or push from where it is."
        )
    found = manifest(path, place_of(path), progress, needed=needed)
    if lacking := missing_shards(path, [entry.path for entry in found.files]):
        raise ModelNotFound(
            f"{path} is not whole: {lacking[0]} is missing"
            + (f" and {len(lacking) - 1} more." if lacking[1:] else "."),
            remedy="Finish the download first.",
        )
    return found


def place_of(path: Path) -> str:
    """The model's place on other hosts: the same path, relative to their own home directory or hub cache."""
    cache = hub_cache()
    if path.is_relative_to(cache) and path.parent.name == "snapshots":
        name = repository_in(path.parent.parent)
        return f"hub:{name}@{path.name}"
    return str(path.relative_to(Path.home()) if path.is_relative_to(Path.home()) else path)


def _verify_s(wanted: Manifest) -> float:
    """The longest time for a host to read all files of a model."""
    return min(VERIFY_S, PART_S * (1 + sum(entry.bytes for entry in wanted.files) / GB))


async def lacking(wanted: Manifest, remotes: Sequence[Remote]) -> dict[str, Inventory | ClusterError]:
    """The files that each host lacks, by checksum; or the error of a host that did not answer."""
    found = await asyncio.gather(
        *(remote.call("inventory", wanted, Inventory, timeout_s=_verify_s(wanted)) for remote in remotes),
        return_exceptions=True,
    )
    result: dict[str, Inventory | ClusterError] = {}
    for remote, one in zip(remotes, found, strict=True):
        if isinstance(one, BaseException) and not isinstance(one, ClusterError):
            raise one
        result[remote.name] = one
    return result


async def push(model: str, wanted: Manifest, remotes: Sequence[Remote], progress: Progress) -> None:
    """Send every host the files that it lacks, then verify all files.

    Raises:
        ClusterError: names the host; received bytes stay there.
    """
    path = directory_of(model)
    assert path is not None
    async with asyncio.TaskGroup() as group:
        for remote in remotes:
            group.create_task(push_to(path, wanted, remote, progress))


async def push_to(path: Path, wanted: Manifest, remote: Remote, progress: Progress) -> None:
    """Send one host the files of a directory that it lacks, then verify all.

    Raises:
        ClusterError: names the host; received bytes stay there.
    """
    found = await remote.call("inventory", wanted, Inventory, timeout_s=_verify_s(wanted))
    partly = {missing.path: missing.have for missing in found.missing}  # a file that a host names twice is sent once
    todo = [(entry, partly[entry.path]) for entry in wanted.files if entry.path in partly]
    for entry, received in todo:
        if received > entry.bytes:
            raise ClusterError(f"{remote.name} says that it has {received} bytes of {entry.path}, of {entry.bytes}.")
    needed = sum(entry.bytes - have for entry, have in todo)
    if needed > found.free:
        raise ClusterError(
            f"{remote.name} has {found.free / GB:.1f} GiB free at {found.directory}; {needed / GB:.1f} GiB will come.",
            remedy="Remove old models there.",
        )
    progress(remote.name, sum(entry.bytes for entry in wanted.files) - needed)
    for entry, have in todo:
        await _send(path / entry.path, wanted.place, entry, have, remote, progress)
    left = await remote.call("finish", wanted, Inventory, timeout_s=_verify_s(wanted))
    if left.missing:
        raise ClusterError(f"{remote.name} still lacks {left.missing[0].path}.", remedy="Run the same command again.")


async def _send(file: Path, place: str, entry: ModelFile, have: int, remote: Remote, progress: Progress) -> None:
    """Send one file through one `phalanx host take`."""
    request = {"place": place, "entry": entry, "have": have}
    async with contextlib.aclosing(_blocks(file, have, lambda count: progress(remote.name, count))) as blocks:
        await remote.call(
            "take", request, ReceivedFile, timeout_s=PART_S * (1 + entry.bytes / GB), blocks=blocks,
            doing=f"phalanx host take {entry.path}",
        )  # fmt: skip


async def _blocks(file: Path, have: int, sent: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    """The rest of a file. `sent` is called once a block was taken."""
    try:
        with file.open("rb") as stream:
            stream.seek(have)
            while block := await asyncio.to_thread(stream.read, BLOCK):
                yield block
                sent(len(block))
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}.") from error


async def pull(
    model: str, first: Remote, others: Sequence[str], show: Callable[[str], None], *, needed: bool = False
) -> None:
    """Download a model on the first host, then push it from there to the others, which the first host must reach.

    Raises:
        ClusterError: the download or the push failed; has its message.
    """
    commands: list[tuple[str, ...]] = [("pull", model)]
    if others:
        commands.append(("model", "push", model, "--hosts", ",".join(others), *(["--needed"] if needed else [])))
    for words in commands:
        show(f"{first.name}$ phalanx {' '.join(words)}")
        doing = f"phalanx {words[0]}"
        # The first host may need the user's agent to reach the others.
        command = first.command(*words, agent=words[0] == "model")
        code, out, err = await run(command, b"", VERIFY_S, first.name, doing=doing)
        if code:
            failed = failure(first.name, code, err, out, doing=doing)
            if words[0] == "model":
                failed.remedy = (
                    f"{failed.remedy} {first.name} copies the model, so it must reach {', '.join(others)} through ssh. "
                    f"Where it cannot, pull it here and run `phalanx model push {model}`."
                ).strip()
            raise failed
        show(printable(shortened(out.strip(), TEXT_CHARS)))
