"""The training text: an endless, seeded mixture of documents.

Every document is a string with special tokens written out. Training uses seeds from 0 up, the held-out set
`HELD_OUT_SEED`, so the two never share a random state; sums marked `arithmetic.held_out` occur in neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from random import Random

from . import about, arithmetic, chat, lists, snippets, story

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIALS = [END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES)]
HELD_OUT_SEED = 1_000_000


def render(turns: list[chat.Turn]) -> str:
    """A conversation exactly as the chat template writes it."""
    return "".join(f"<|{role}|>{content}{END_OF_TURN}" for role, content in turns)


def _chat(make: Callable[[Random], list[chat.Turn]]) -> Callable[[Random], str]:
    """A document maker from a conversation maker."""
    return lambda rng: render(make(rng))


# Weights are shares of documents, not of tokens: a long story weighs as much as fifty sums.
MIXTURE: list[tuple[float, str, Callable[[Random], str]]] = [
    (32.0, "single", _chat(chat.single)),
    (9.0, "session", _chat(chat.session)),
    (16.0, "conversation", _chat(chat.conversation)),
    (5.0, "small_talk", _chat(chat.small_talks)),
    (2.5, "storytelling", _chat(chat.storytelling)),
    (2.0, "long_answer", _chat(chat.long_answer)),
    (6.0, "worksheet", arithmetic.worksheet),
    (0.5, "notes", about.notes),
    (0.8, "short_story", lambda rng: story.document(rng, "short")),
    (0.2, "medium_story", lambda rng: story.document(rng, "medium")),
    (0.15, "long_story", lambda rng: story.document(rng, "long")),
    (6.0, "echo", snippets.echo),
    (0.4, "source_file", snippets.source_file),
    (0.2, "task_list", lambda rng: lists.numbered(lists.tasks(rng, rng.randint(5, 40)))),
]


def documents(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """`count` documents as (kind, text), determined by the seed."""
    rng = Random(seed)
    kinds = rng.choices(MIXTURE, [weight for weight, _, _ in MIXTURE], k=count)
    for _, name, make in kinds:
        yield name, make(rng) + END_OF_TEXT


def main() -> None:
    """Print some documents, to look at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    for name, text in documents(options.seed, options.count):
        print(f"--- {name}\n{text}")


if __name__ == "__main__":
    main()
