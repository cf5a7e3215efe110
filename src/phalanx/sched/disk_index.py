"""Which prefixes are on the ranks' disks: the leader's index of them, and what is dropped to make room.

A prefix is a chain of blocks of 256 tokens. A block's name is a hash of its tokens and of its parent's name, and the
first parent's name is a hash of who shares the prefix, keyed with a secret; the tokens are compared as well. With
recurrent state, which serves only whole, the last block of a chain is an *ending* of any length. A block counts once
every rank has written it. Blocks are dropped least recently used first, those that were used a second time after all
others. Does not know files (`prefix_store/`), nor which entries are in memory (`prefix.py`).
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
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES  # of a block's tokens
NAME_BYTES = 16


class DiskHit(NamedTuple):
    """The first `length` tokens looked up are on disk."""

    names: tuple[bytes, ...]
    length: int


class NewBlocks(NamedTuple):
    """Blocks to be written, the first of which is the chain's block number `first`."""

    first: int
    blocks: tuple[DiskBlock, ...]
    dropped: tuple[bytes, ...]
    """Names of blocks that make room."""


class DiskIndex:
    """Blocks by name.

    Args:
        secret: of this installation; without it names say nothing about keys and tokens.
        max_blocks: that a disk holds, endings not included.
        max_endings: the same for endings, where `whole_only`.
        whole_only: recurrent state exists only at the end of a prefix.
    """

    def __init__(self, secret: bytes, max_blocks: int, max_endings: int = 0, *, whole_only: bool = False) -> None:
        self._secret = secret
        self._whole_only = whole_only
        self._blocks: dict[bytes, DiskBlock] = {}
        self._endings: dict[bytes, dict[bytes, None]] = {}  # parent -> names of endings
        self._uses = (_Uses(max_blocks), _Uses(max_endings))  # of blocks, of endings
        self._pending: set[bytes] = set()  # names of blocks that are being written

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> Collection[bytes]:
        """Of all blocks that count."""
        return self._blocks.keys()

    def add(self, blocks: Iterable[DiskBlock]) -> None:
        """All ranks have these blocks, those used longest ago first."""
        for block in blocks:
            self._blocks[block.name] = block
            self._uses[block.ending].add(block.name)
            if block.ending:
                self._endings.setdefault(block.parent, {})[block.name] = None

    def trim(self) -> tuple[bytes, ...]:
        """Drop what the limits do not allow. Changes state. Returns the names."""
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
        """These blocks of a chain, first to last, were of use. Changes state."""
        for name in reversed([*names]):  # a block is never older than those that need it
            if (block := self._blocks.get(name)) is not None:
                self._uses[block.ending].use(name)

    def write(self, sharing: str, owner: str, tokens: list[int]) -> NewBlocks | None:
        """Plan to write the blocks of a prefix that are not there yet; None if there are none, or no room. Changes
        state: the new ones count when they are `add`ed, and `forget` gives their room back."""
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
        """The blocks of a prefix that are neither there nor being written, all of them at its end."""
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
        """The outcome of a write that was planned. Changes state. Returns names to be dropped on the ranks."""
        for block in blocks:
            self._uses[block.ending].pending -= 1
            self._pending.discard(block.name)
        if written:
            self.add(blocks)
            return ()
        return tuple(block.name for block in blocks)

    def forget(self, names: Iterable[bytes]) -> tuple[bytes, ...]:
        """Drop blocks. Changes state. Returns those that were there."""
        there = tuple(name for name in names if name in self._blocks)
        for name in there:
            self._uses[self._blocks[name].ending].drop(name)
        self._remove(there)
        return there

    def forget_owners(self, kept: Collection[str]) -> tuple[bytes, ...]:
        """Drop what belongs to other owners. Changes state. Returns the names."""
        tags = {self.owner_tag(owner) for owner in kept}
        return self.forget([name for name, block in self._blocks.items() if block.owner not in tags])

    def clear(self) -> tuple[bytes, ...]:
        """Drop everything. Changes state. Returns the names."""
        return self.forget(list(self._blocks))

    def owner_tag(self, owner: str) -> bytes:
        """Stands for the API key of an owner: behind a gateway, whose clients' owners contain its own, for the
        gateway's."""
        return hashlib.blake2b(owner.partition(".")[0].encode(), key=self._secret, digest_size=8).digest()

    def _root(self, sharing: str) -> bytes:
        return hashlib.blake2b(sharing.encode(), key=self._secret, digest_size=NAME_BYTES).digest()

    def _chain(self, sharing: str, known: bytes) -> list[bytes]:
        """Names of the whole blocks that are there, first to last."""
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
    """The order in which names are dropped, within a number of them."""

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
        """Whether `n` more fit, if others are dropped."""
        return self.pending + n <= self._limit

    def make_room(self, n: int) -> list[bytes]:
        """Drop as many as `n` more need. Changes state. Returns their names."""
        dropped = []
        while len(self._once) + len(self._again) + self.pending + n > self._limit:
            dropped.append((self._once or self._again).popitem(last=False)[0])
        return dropped


def _name(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, key=parent, digest_size=NAME_BYTES).digest()
