"""Which prefixes are kept, found and evicted: the leader's index of the prefix cache.

Every rank keeps the arrays under an entry number (`model/runner.py`); this index decides, and plans carry its
decisions. An entry is the token list whose KV is kept. Entries are found by chained hashes of 16-token blocks, compared
token by token before use, and evicted least recently used first within a byte budget. Keys include a salt, so only
requests of one API key share entries; model, dtype and precision need no key, as an index never outlives the engine
process. Also finds prefixes of rows that are being computed (`live_prefix`). Does not know where rows live.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from phalanx.sched.sequence import Hit, Sequence

BLOCK = 16  # tokens


class _PrefixEntry(NamedTuple):
    salt: str
    tokens: array[int]
    blocks: list[int]
    n_bytes: int


def common_prefix(a: array[int] | list[int], b: array[int] | list[int], limit: int) -> int:
    """Length of the common prefix of two token lists, at most `limit`."""
    limit = min(limit, len(a), len(b))
    low, high = 0, limit
    if a[:limit] == b[:limit]:
        return limit
    while low < high:  # the first difference, by halving
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def live_prefix(
    rows: Iterable[Sequence], seq: Sequence, limit: int, *, whole_only: bool
) -> tuple[Sequence | None, int]:
    """The live row of the same owner and salt that shares the longest computed prefix, at least one block; its length.

    Args:
        limit: longest prefix of use.
        whole_only: only rows whose whole computed part is a prefix of `seq`: recurrent state cannot be cut.
    """
    best, best_length = None, BLOCK - 1
    for row in rows:
        if row is seq or row.request.sharing != seq.request.sharing:
            continue
        if whole_only and (row.kv_len > limit or row.in_flight):
            continue
        length = common_prefix(row.tokens, seq.tokens, min(row.kv_len, limit))
        if length > best_length and (not whole_only or length == row.kv_len):
            best, best_length = row, length
    return best, best_length


def sibling_prefills(rows: Iterable[Sequence], seq: Sequence) -> bool:
    """Whether another choice of the same request is prefilling the prompt, which this one can then share."""
    if seq.request.sampling.choice == 0 or seq.prompt_len <= BLOCK or seq.wants_scores:
        return False
    return any(
        row.request.group == seq.request.group and row.request.prompt == seq.request.prompt and not row.decoding
        for row in rows
    )


class PrefixIndex:
    """Entries by number, least recently used first.

    Args:
        budget: bytes all entries may take together; 0 turns the cache off.
        bytes_per_token, bytes_per_row: an entry of n tokens costs `n * bytes_per_token + bytes_per_row`.
        whole_only: recurrent state exists only at its exact length, so an entry is usable only whole.
    """

    def __init__(self, budget: int, bytes_per_token: int, bytes_per_row: int = 0, *, whole_only: bool = False) -> None:
        self.budget = budget
        self.used = 0
        self._bytes_per_token = bytes_per_token
        self._bytes_per_row = bytes_per_row
        self._whole_only = whole_only
        self._entries: OrderedDict[int, _PrefixEntry] = OrderedDict()
        self._by_block: dict[int, dict[int, None]] = {}  # block hash -> entries that contain it, oldest first
        self._next = 0
        self._hidden: set[int] = set()  # entries that are being loaded

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def find(self, salt: str, tokens: list[int], limit: int) -> Hit | None:
        """The entry that shares the longest prefix with `tokens[:limit]`, at least one block. Marks it as used."""
        if not self._entries:
            return None
        known = array("q", tokens[:limit])
        best: Hit | None = None
        for block in reversed(_chain(salt, known)):
            for number in reversed(self._by_block.get(block, ())):
                if number in self._hidden:
                    continue
                length = self._usable(self._entries[number], salt, known)
                if length >= BLOCK and (best is None or length > best.length):
                    best = Hit(number, length)
            if best is not None:
                self._entries.move_to_end(best.entry)
                return best
        return None

    def add(self, salt: str, tokens: list[int]) -> tuple[int | None, list[int]]:
        """Plan to keep the KV of `tokens`.

        Returns:
            The entry's number, or None when it is not worth keeping (too short, over the budget, or contained in an
            existing entry), and the entries to evict for it.
        """
        kept = array("q", tokens)
        n_bytes = len(kept) * self._bytes_per_token + self._bytes_per_row
        if len(kept) < BLOCK or n_bytes > self.budget:
            return None, []
        blocks = _chain(salt, kept)
        evicted = []
        for number in list(self._by_block.get(blocks[-1], ())):
            entry = self._entries[number]
            if number in self._hidden:
                continue
            if entry.salt == salt and entry.tokens[: len(kept)] == kept and not self._whole_only:
                self._entries.move_to_end(number)
                return None, []
            if entry.salt == salt and entry.tokens == kept:
                self._entries.move_to_end(number)
                return None, []
        if not self._whole_only:  # shorter entries that this one contains are superseded
            for number in self._contained(blocks, kept, salt):
                self.drop(number)
                evicted.append(number)
        return self._insert(_PrefixEntry(salt, kept, blocks, n_bytes), evicted)

    def reserve(self, salt: str, tokens: list[int]) -> tuple[int | None, list[int]]:
        """As `add`, for an entry about to be loaded: `find` ignores it until `reveal`, and it supersedes no entry."""
        kept = array("q", tokens)
        n_bytes = len(kept) * self._bytes_per_token + self._bytes_per_row
        if n_bytes > self.budget:
            return None, []
        number, evicted = self._insert(_PrefixEntry(salt, kept, _chain(salt, kept), n_bytes), [])
        self._hidden.add(number)
        return number, evicted

    def reveal(self, number: int) -> None:
        """The entry has been loaded: `find` may return it."""
        self._hidden.discard(number)

    def _insert(self, new: _PrefixEntry, evicted: list[int]) -> tuple[int, list[int]]:
        while self.used + new.n_bytes > self.budget:
            number = next(iter(self._entries))
            self.drop(number)
            evicted.append(number)
        number = self._next
        self._next += 1
        self._entries[number] = new
        for block in new.blocks:
            self._by_block.setdefault(block, {})[number] = None
        self.used += new.n_bytes
        return number, evicted

    def length(self, number: int) -> int:
        """Tokens of an entry; 0 if there is none with this number."""
        return len(self._entries[number].tokens) if number in self._entries else 0

    def nearest(self, salt: str, tokens: list[int]) -> tuple[int, int]:
        """The entry with the longest common prefix with `tokens`, usable or not: (its length, the common length).

        Common prefixes below one block are compared up to a block only.
        """
        known = array("q", tokens)
        for block in reversed(_chain(salt, known) if self._entries else []):
            entries = [self._entries[number] for number in self._by_block.get(block, ())]
            if shared := [self._in_common(entry, salt, known, len(known)) for entry in entries]:
                return max(shared, key=lambda found: found[1])
        alike = (self._in_common(entry, salt, known, BLOCK) for entry in self._entries.values())
        return max(alike, key=lambda found: found[1], default=(0, 0))

    def clear(self) -> list[int]:
        """Drop every entry. Returns the entries to evict on the ranks."""
        numbers = list(self._entries)
        for number in numbers:
            self.drop(number)
        return numbers

    def _usable(self, entry: _PrefixEntry, salt: str, known: array[int]) -> int:
        if entry.salt != salt:
            return 0
        length = common_prefix(entry.tokens, known, len(known))
        return length if not self._whole_only or length == len(entry.tokens) else 0

    def _in_common(self, entry: _PrefixEntry, salt: str, known: array[int], limit: int) -> tuple[int, int]:
        """See `nearest`; (0, 0) for another salt."""
        return (len(entry.tokens), common_prefix(entry.tokens, known, limit)) if entry.salt == salt else (0, 0)

    def _contained(self, blocks: list[int], kept: array[int], salt: str) -> list[int]:
        candidates = {n for block in blocks for n in self._by_block.get(block, ())}
        found = []
        for number in sorted(candidates):
            entry = self._entries[number]
            if (
                number not in self._hidden
                and entry.salt == salt
                and len(entry.tokens) < len(kept)
                and kept[: len(entry.tokens)] == entry.tokens
            ):
                found.append(number)
        return found

    def drop(self, number: int) -> None:
        """Drop an entry. The caller must evict it on the ranks."""
        self._hidden.discard(number)
        entry = self._entries.pop(number)
        self.used -= entry.n_bytes
        for block in entry.blocks:
            holders = self._by_block[block]
            del holders[number]
            if not holders:
                del self._by_block[block]


def _chain(salt: str, tokens: array[int]) -> list[int]:
    """Hash of every whole-block prefix, shortest first. Collisions cost a comparison, never a wrong hit."""
    chained = hash(salt)
    out = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chained = hash((chained, *tokens[start : start + BLOCK]))
        out.append(chained)
    return out
