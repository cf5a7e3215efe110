"""The leader's index of prefixes on the ranks' disks, and their eviction.

A prefix is a chain of blocks of 256 tokens. A block's name is a hash of its tokens and its parent's name; the root of a
chain is a hash of the sharing salt, keyed with a secret. Lookups also compare the tokens. With recurrent state, usable
only whole, the last block of a chain is an *ending* of any length. A block is in the index once every rank has written
it. Eviction is least recently used first; blocks that were reused go after all others. Does not know files
(`prefix_store/`), nor which entries are in memory (`prefix.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from phalanx.sched.plan import DiskBlock

BLOCK_TOKENS = 256
TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES  # of a block's token ids
NAME_BYTES = 16


class DiskHit(NamedTuple):
    """The first `length` tokens looked up are on disk."""

    names: tuple[bytes, ...]
    length: int


class NewBlocks(NamedTuple):
    """Blocks to write; `first` is the index in the chain of the first one."""

    first: int
    blocks: tuple[DiskBlock, ...]
    dropped: tuple[bytes, ...]
    """Names of blocks evicted to make room."""


class DiskIndex:
    """Blocks by name.

    Args:
        secret: of this installation; without it names reveal neither keys nor tokens.
        max_blocks: per disk, without endings.
        max_endings: per disk, with `whole_only`.
        whole_only: prefixes hold recurrent state, which exists only at their end.
    """

    def __init__(self, secret: bytes, max_blocks: int, max_endings: int = 0, *, whole_only: bool = False) -> None:
        self._secret = secret
        self._whole_only = whole_only
        self._blocks: dict[bytes, DiskBlock] = {}
        self._endings: dict[bytes, dict[bytes, None]] = {}  # parent -> names of endings
        self._uses = (_Uses(max_blocks), _Uses(max_endings))  # of blocks, of endings
        self._pending: set[bytes] = set()  # names of blocks being written

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> Collection[bytes]:
        """Names of all blocks in the index."""
        return self._blocks.keys()

    def add(self, blocks: Iterable[DiskBlock]) -> None:
        """Add blocks that all ranks have, least recently used first. Changes state."""
        for block in blocks:
            self._blocks[block.name] = block
            self._uses[block.ending].add(block.name)
            if block.ending:
                self._endings.setdefault(block.parent, {})[block.name] = None

    def trim(self) -> tuple[bytes, ...]:
        """Evict blocks beyond the limits. Changes state. Returns their names."""
        dropped = [name for uses in self._uses for name in uses.make_room(0)]
        self._remove(dropped)
        return tuple(dropped)

    def find(self, sharing: str, tokens: list[int], limit: int) -> DiskHit | None:
        """The longest prefix of `tokens[:limit]` on disk. Changes nothing."""
        known = array("I", tokens[:limit]).tobytes()
        names = self._chain(sharing, known)
        if not self._whole_only:
            return DiskHit(tuple(names), len(names) * BLOCK_TOKENS) if names else None
        root = self._root(sharing)
        for depth in range(len(names), -1, -1):
            rest = known[depth * BLOCK_BYTES :]
            endings = self._endings.get(names[depth - 1] if depth else root, ())
            fitting = [name for name in endings if rest.startswith(self._blocks[name].tokens)]
            if fitting:
                best = max(fitting, key=lambda name: len(self._blocks[name].tokens))
                length = depth * BLOCK_TOKENS + len(self._blocks[best].tokens) // TOKEN_BYTES
                return DiskHit((*names[:depth], best), length)
        return None

    def use(self, names: Iterable[bytes]) -> None:
        """Mark the blocks of a chain, first to last, as reused. Changes state."""
        for name in reversed([*names]):  # a parent is always more recent than its children
            if (block := self._blocks.get(name)) is not None:
                self._uses[block.ending].use(name)

    def write(self, sharing: str, owner: str, tokens: list[int]) -> NewBlocks | None:
        """Plan to write the missing blocks of a prefix; None if there are none, or no room. Changes state: reserves
        room for them until `settle`."""
        known = array("I", tokens).tobytes()
        chain = self._chain(sharing, known)
        self.use(chain)
        new = self._new_blocks(sharing, self.owner_tag(owner), known, chain)
        counts = [sum(block.ending is ending for block in new) for ending in (False, True)]
        blocks, endings = self._uses
        if not new or not (blocks.has_room(len(chain) + counts[0]) and endings.has_room(counts[1])):
            return None
        dropped = [name for uses, n in zip(self._uses, counts, strict=True) for name in uses.make_room(n)]
        self._remove(dropped)
        for uses, n in zip(self._uses, counts, strict=True):
            uses.pending += n
        self._pending.update(block.name for block in new)
        first = len(known) // BLOCK_BYTES - counts[0]
        return NewBlocks(first, tuple(new), tuple(dropped))

    def _new_blocks(self, sharing: str, owner: bytes, known: bytes, chain: list[bytes]) -> list[DiskBlock]:
        """The blocks of a prefix from the first one on that is neither on disk nor being written."""
        parent = chain[-1] if chain else self._root(sharing)
        new: list[DiskBlock] = []
        for start in range(len(chain) * BLOCK_BYTES, len(known) - BLOCK_BYTES + 1, BLOCK_BYTES):
            tokens = known[start : start + BLOCK_BYTES]
            name = _name(parent, tokens)
            if new or name not in self._pending:
                new.append(DiskBlock(name, parent, tokens, owner))
            parent = name
        if self._whole_only:
            rest = known[len(known) // BLOCK_BYTES * BLOCK_BYTES :]
            name = _name(parent, b"end" + rest)
            if name not in self._blocks and name not in self._pending:
                new.append(DiskBlock(name, parent, rest, owner, ending=True))
        return new

    def settle(self, blocks: Collection[DiskBlock], *, written: bool) -> tuple[bytes, ...]:
        """End a planned write. Changes state. Returns the names that ranks must drop."""
        for block in blocks:
            self._uses[block.ending].pending -= 1
            self._pending.discard(block.name)
        if written:
            self.add(blocks)
            return ()
        return tuple(block.name for block in blocks)

    def forget(self, names: Iterable[bytes]) -> tuple[bytes, ...]:
        """Drop blocks. Changes state. Returns the names of those in the index."""
        there = tuple(name for name in names if name in self._blocks)
        for name in there:
            self._uses[self._blocks[name].ending].drop(name)
        self._remove(there)
        return there

    def forget_owners(self, kept: Collection[str]) -> tuple[bytes, ...]:
        """Drop the blocks of all other owners. Changes state. Returns their names."""
        tags = {self.owner_tag(owner) for owner in kept}
        return self.forget([name for name, block in self._blocks.items() if block.owner not in tags])

    def clear(self) -> tuple[bytes, ...]:
        """Drop all blocks. Changes state. Returns their names."""
        return self.forget(list(self._blocks))

    def owner_tag(self, owner: str) -> bytes:
        """A keyed hash of the owner; behind a gateway, whose clients' owners begin with its own, of the gateway's."""
        return hashlib.blake2b(owner.partition(".")[0].encode(), key=self._secret, digest_size=8).digest()

    def _root(self, sharing: str) -> bytes:
        return hashlib.blake2b(sharing.encode(), key=self._secret, digest_size=NAME_BYTES).digest()

    def _chain(self, sharing: str, known: bytes) -> list[bytes]:
        """Names of the whole blocks on disk, first to last."""
        parent, names = self._root(sharing), []
        for start in range(0, len(known) - BLOCK_BYTES + 1, BLOCK_BYTES):
            tokens = known[start : start + BLOCK_BYTES]
            block = self._blocks.get(_name(parent, tokens))
            if block is None or block.tokens != tokens or block.parent != parent:
                break
            names.append(parent := block.name)
        return names

    def _remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            block = self._blocks.pop(name)
            if block.ending:
                siblings = self._endings[block.parent]
                del siblings[name]
                if not siblings:
                    del self._endings[block.parent]


class _Uses:
    """Eviction order of at most `limit` names: those used once first, then those reused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.pending = 0  # being written
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes) -> None:
        self.drop(name)
        self._once[name] = None

    def use(self, name: bytes) -> None:
        self.drop(name)
        self._again[name] = None

    def drop(self, name: bytes) -> None:
        self._once.pop(name, None)
        self._again.pop(name, None)

    def has_room(self, n: int) -> bool:
        """Whether `n` more fit after eviction."""
        return self.pending + n <= self._limit

    def make_room(self, n: int) -> list[bytes]:
        """Evict until `n` more fit. Changes state. Returns the evicted names."""
        dropped = []
        while len(self._once) + len(self._again) + self.pending + n > self._limit:
            dropped.append((self._once or self._again).popitem(last=False)[0])
        return dropped


def _name(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, key=parent, digest_size=NAME_BYTES).digest()
