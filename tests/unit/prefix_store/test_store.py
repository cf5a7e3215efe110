"""A rank's blocks on disk: whatever happens to the files, a block that can be read is the one that was written."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError, StoreError
from phalanx.prefix_store import store as store_module
from phalanx.prefix_store.store import PrefixStore
from phalanx.sched.plan import DiskBlock

SIZES = (96, 160)
FILES = ("index", "blocks", "endings")
CHILD = """
import sys
from test_store import name_of, open_store, put
store, i = open_store(sys.argv[1]), int(sys.argv[2])
print("begun", flush=True)
while True:
    put(store, i, i + 1, i + 2)
    print(i, flush=True)
    store.drop([name_of(i - 3)])
    i += 3
"""


def open_store(folder: Path | str, identity: str = "model", sizes: tuple[int, int] = SIZES) -> PrefixStore:
    return PrefixStore(Path(folder), identity, sizes)


def name_of(i: int) -> bytes:
    return hashlib.blake2b(b"%d" % i, digest_size=16).digest()


def content(i: int) -> np.ndarray:
    """The bytes of block i; every fifth is an ending."""
    size = SIZES[i % 5 == 0] - i % 7
    return np.frombuffer(random.Random(i).randbytes(size), np.uint8)


def block_of(i: int) -> DiskBlock:
    return DiskBlock(name_of(i), name_of(i - 1), b"%4d" % i, b"owner", ending=i % 5 == 0)


def put(store: PrefixStore, *numbers: int) -> int:
    return store.write([(block_of(i), lambda i=i: content(i)) for i in numbers])


def read(store: PrefixStore, i: int) -> bytes:
    return store.read(name_of(i), np.empty(max(SIZES), np.uint8)).tobytes()


def right(store: PrefixStore, numbers: range) -> set[int]:
    """The blocks that can be read, each of which must be what was written."""
    found = set()
    for i in numbers:
        try:
            data = read(store, i)
        except StoreError:
            continue
        assert data == content(i).tobytes(), f"block {i} holds something else"
        found.add(i)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_blocks_are_there_again_in_the_order_of_their_use(tmp_path_factory, seed):
    rnd, folder = random.Random(seed), tmp_path_factory.mktemp("store") / "rank"
    store, order = open_store(folder), []
    for _ in range(25):
        match rnd.randrange(4):
            case 0 | 1:
                new = [i for i in rnd.sample(range(40), 3) if i not in order]
                put(store, *new)
                order += new
            case 2:
                gone = [i for i in order if rnd.random() < 0.3]
                store.drop([name_of(i) for i in [*gone, 99]])
                order = [i for i in order if i not in gone]
            case 3:
                used = [i for i in order if rnd.random() < 0.3]
                store.use([name_of(i) for i in used])
                order = [i for i in order if i not in used] + used
        if rnd.random() < 0.2:
            store.close()
            store = open_store(folder)
        assert [block.name for block in store.blocks] == [name_of(i) for i in order]
        assert right(store, range(40)) == set(order)
        for name, size, ending in (("blocks", SIZES[0], False), ("endings", SIZES[1], True)):
            most = sum((i % 5 == 0) is ending for i in range(40))
            assert (folder / name).stat().st_size <= most * size
    store.close()


def test_files_are_this_users_alone_and_slots_are_taken_again(tmp_path):
    store = open_store(tmp_path / "a" / "rank")
    assert put(store, *range(1, 5)) == sum(map(len, map(content, range(1, 5))))
    size = (tmp_path / "a" / "rank" / "blocks").stat().st_size
    for i in range(6, 40):
        store.drop([name_of(i - 5)])
        if i % 5:
            put(store, i)
    assert (tmp_path / "a" / "rank" / "blocks").stat().st_size <= size + SIZES[0]
    store.close()
    assert (tmp_path / "a" / "rank").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "rank").iterdir()} == {0o600}


def test_the_index_stays_short(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SLACK", 2000)
    store = open_store(tmp_path / "rank")
    for i in range(1, 400):
        put(store, i)
        store.drop([name_of(i - 2)])
    assert (tmp_path / "rank" / "index").stat().st_size < 4000
    assert right(store, range(400)) == {398, 399}
    store.close()


def test_a_second_server_is_refused_and_so_is_a_folder_that_others_may_enter(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_PATIENCE_S", 0.2)
    store = open_store(tmp_path / "rank")
    with pytest.raises(ConfigError, match=r"another server uses .*/rank"):
        open_store(tmp_path / "rank")
    store.close()
    (tmp_path / "rank").chmod(0o755)
    with pytest.raises(ConfigError, match=r"others may enter it.*chmod 700"):
        open_store(tmp_path / "rank")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/rank cannot be used: Not a directory"):
        open_store(tmp_path / "file" / "rank")


@pytest.mark.parametrize("other", [{"identity": "another"}, {"format": 2}])
def test_another_model_plan_or_version_starts_empty_with_another_secret(tmp_path, monkeypatch, other):
    store = open_store(tmp_path / "rank")
    put(store, 1, 5)
    store.close()
    monkeypatch.setattr(store_module, "FORMAT", other.get("format", store_module.FORMAT))
    again = open_store(tmp_path / "rank", other.get("identity", "model"))
    assert again.blocks == [] and again.secret != store.secret
    assert (tmp_path / "rank" / "blocks").stat().st_size == 0
    again.close()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.one_of(st.none(), st.integers(0, 7)))
def test_a_flipped_bit_or_a_file_cut_short_gives_no_wrong_block(tmp_path_factory, name, place, bit):
    folder = tmp_path_factory.mktemp("store") / "rank"
    store = open_store(folder)
    put(store, *range(1, 8))
    store.drop([name_of(2), name_of(5)])
    put(store, *range(8, 12))
    store.close()
    path = folder / name
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    if bit is None:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    path.write_bytes(data)
    store = open_store(folder)
    found = right(store, range(1, 20))
    assert name == "index" or bit is None or len(found) >= 8, "one of nine is damaged"
    put(store, 50, 51, 52)
    assert {50, 51, 52} <= right(store, range(60))
    store.close()


@pytest.mark.parametrize("call", ["pwrite", "write", "fdatasync"])
def test_a_full_disk_leaves_what_was_there_and_names_nothing_new(tmp_path, monkeypatch, call):
    store = open_store(tmp_path / "rank")
    put(store, 1, 2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if call == "fdatasync":
            patch.setattr(store_module, "sync", full)
        else:
            patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            put(store, 3, 4)
    assert right(store, range(1, 9)) == {1, 2}
    put(store, 6)
    store.close()
    again = open_store(tmp_path / "rank")
    assert right(again, range(1, 9)) >= {1, 2}
    again.close()


def test_what_is_recorded_behind_half_a_record_counts(tmp_path, monkeypatch):
    store = open_store(tmp_path / "rank")
    put(store, 1, 2)
    write = os.write
    rooms = [40, 0]  # bytes

    def nearly_full(file: int, data: memoryview) -> int:
        if room := rooms.pop(0):
            return write(file, data[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match="No space left"):
            put(store, 3)
    put(store, 4)
    store.drop([name_of(1)])
    store.close()
    again = open_store(tmp_path / "rank")
    assert right(again, range(1, 9)) == {2, 4}
    again.close()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_deleted_is_written_no_more_and_gives_its_space_back(tmp_path, name):
    store = open_store(tmp_path / "rank")
    put(store, 1, 5)
    (tmp_path / "rank" / name).unlink()
    for write in (lambda: put(store, 2), lambda: store.drop([name_of(1)])):
        with pytest.raises(OSError, match=r"/rank was deleted"):
            write()
    assert [os.fstat(file).st_size for file in store._files] == [0, 0]
    store.use([name_of(5)])
    assert right(store, range(9)) == set()
    store.close()


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_a_process_that_is_killed_at_any_moment_leaves_whole_blocks(tmp_path, kills):
    folder, rnd, begun = tmp_path / "rank", random.Random(kills), 10
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(begun)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        said = [int(child.stdout.readline()) for _ in range(rnd.randrange(6))]
        for _ in range(rnd.randrange(20_000)):
            pass  # somewhere inside a write
        child.send_signal(signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().split()]
        child.wait()
        store = open_store(folder)
        last = max([begun, *said])
        numbers = {name_of(i): i for i in range(last + 9)}
        assert all(read(store, i) == content(i).tobytes() for i in (numbers[block.name] for block in store.blocks))
        assert not said or {name_of(i) for i in range(last, last + 3)} <= {block.name for block in store.blocks}
        begun = last + 6
        store.drop([block.name for block in store.blocks[:-4]])
        store.close()
