"""Packs documents into training rows of a few fixed lengths. Every row begins at the beginning of a document."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import corpus

LENGTHS = (256, 512, 1024)
Batch = tuple[NDArray[np.int64], NDArray[np.bool_]]  # tokens [n, length + 1], which targets count [n, length]
Rows = NDArray[np.uint16]


def encode(tokenizer: Tokenizer, seed: int, count: int) -> list[list[int]]:
    """The documents of one seed as token ids."""
    texts = [text for _, text in corpus.documents(seed, count)]
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def pack(documents: list[list[int]]) -> dict[int, Rows]:
    """Rows of length + 1 for each of `LENGTHS`.

    A row starts with a document that is too long for the next shorter length and is filled up with short documents;
    the last one is cut. So short skills are also learned at late positions.
    """
    short = deque(d for d in documents if len(d) <= LENGTHS[0] + 1)
    starts: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
    for document in documents:
        if len(document) > LENGTHS[0] + 1:
            fitting = next((length for length in LENGTHS if len(document) <= length + 1), LENGTHS[-1])
            starts[fitting].append(document)
    rows: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
    for length in LENGTHS[1:]:
        for row in starts[length]:
            while len(row) < length + 1 and short:
                row = row + short.popleft()
            if len(row) > length:
                rows[length].append(row[: length + 1])
    row = []
    for document in short:
        row += document
        if len(row) > LENGTHS[0]:
            rows[LENGTHS[0]].append(row[: LENGTHS[0] + 1])
            row = []
    return {length: np.array(found, dtype=np.uint16).reshape(-1, length + 1) for length, found in rows.items()}


def answered(batch: NDArray[np.int64], asked: list[int]) -> NDArray[np.bool_]:
    """Which targets of a batch [n, length + 1] count: all but the text of user and system turns.

    What people ask is random here (names, numbers), so that learning to predict it would drown the answers. `asked` are
    the ids of the role tokens that open such text; every special token has an id below `len(corpus.SPECIALS)`.
    """
    position = np.arange(batch.shape[1])[None, :]
    opened = np.maximum.accumulate(np.where(batch < len(corpus.SPECIALS), position, 0), axis=1)
    role = np.take_along_axis(batch, opened, axis=1)[:, :-1]
    return ~np.isin(role, asked)


def repeats(rng: np.random.Generator, count: int, length: int, vocabulary: int) -> Batch:
    """Rows in which stretches of random tokens occur several times; only the repetitions count.

    Teaches one thing that ordinary text teaches slowly: to continue a sequence as it went on before (induction heads).
    A row uses few different tokens, which occur again and again, all rows together use the whole vocabulary.
    """
    batch = np.empty((count, length + 1), dtype=np.int64)
    counted = np.zeros((count, length), dtype=np.bool_)
    for row in range(count):
        pool = rng.choice(np.arange(len(corpus.SPECIALS), vocabulary), rng.integers(24, 97), replace=False)
        at = 0
        while at <= length:
            stretch = rng.choice(pool, rng.integers(4, 21), replace=False)
            again = np.tile(stretch, rng.integers(2, 4))[: length + 1 - at]
            batch[row, at : at + len(again)] = again
            counted[row, at + len(stretch) : at + len(again) - 1] = True
            at += len(again)
    return batch, counted


def batches(tokenizer: Tokenizer, first_seed: int, tokens: int, documents: int, stride: int) -> Iterator[Batch]:
    """Endless batches [tokens // length, length + 1], lengths mixed in proportion to the corpus.

    Documents come from the seeds `first_seed`, `first_seed + stride`, ...
    """
    seed = first_seed
    asked = [corpus.SPECIALS.index("<|user|>"), corpus.SPECIALS.index("<|system|>")]
    while True:
        rng = Random(seed)
        pending: list[NDArray[np.int64]] = []
        for length, rows in pack(encode(tokenizer, seed, documents)).items():
            order = list(range(len(rows)))
            rng.shuffle(order)
            size = tokens // length
            pending += [rows[order[i : i + size]].astype(np.int64) for i in range(0, len(rows) - size + 1, size)]
        rng.shuffle(pending)
        for batch in pending:
            yield batch, answered(batch, asked)
        seed += stride
