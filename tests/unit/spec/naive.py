"""The lookup drafters once more, as plainly as possible: no index, every place is looked at. Quadratic."""

from __future__ import annotations

from phalanx.spec.drafters import Draft, bucket
from phalanx.spec.lookup import NEAR, PLACES, SLACK
from phalanx.spec.ngram import COMPARED
from phalanx.spec.suffix import NEARBY_WEIGHT, RUNS


class Naive:
    """Texts as lists, and one list of all places in the order in which they became known."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.running: dict[int, tuple[str, list[int]]] = {}
        self.ended: list[tuple[str, list[int]]] = []  # the latest first
        self.known: list[tuple[list[int], int]] = []

    def begin(self, key, tokens, salt=""):
        self.running[key] = (salt, list(tokens))

    def extend(self, key, tokens):
        self.running[key][1].extend(tokens)

    def end(self, key):
        self.ended = [self.running.pop(key), *self.ended][: self.requests]

    def draft(self, wanted):
        texts = [tokens for _, tokens in (*(self.running[key] for key in wanted), *self.ended[::-1])]
        for tokens in sorted(texts, key=lambda tokens: len(tokens) - self.n_known(tokens)):
            self.known += [(tokens, at) for at in range(self.n_known(tokens), len(tokens))]
        drafts = {key: self.continuation(*self.running[key], n) for key, n in wanted.items()}
        return {key: draft for key, draft in drafts.items() if draft.tokens}

    def n_known(self, tokens):
        return sum(known is tokens for known, _ in self.known)

    def places(self, salt, tokens, size):
        """Where the last `size` tokens occurred before: (text, place of the token after them), the latest first."""
        shared = [*self.running.values(), *self.ended] if self.requests else []
        allowed = [tokens, *(text for other, text in shared if other == salt)]
        found = [
            (text, at)
            for text, at in self.known[::-1]
            if at >= size <= len(tokens)
            and any(text is each for each in allowed)
            and text[at - size : at] == tokens[len(tokens) - size :]
        ]
        return found[:PLACES]

    def continuation(self, salt, tokens, n):
        raise NotImplementedError

    def context(self, tokens, before, depth):
        most = min(depth, len(tokens), len(before))
        return max(n for n in range(most + 1) if tokens[len(tokens) - n :] == before[len(before) - n :])


def graded(tokens, rights):
    return Draft(tokens, [bucket(right / (1 - right)) for right in rights])


class NaiveNgram(Naive):
    def __init__(self, longest: int, shortest: int, requests: int) -> None:
        super().__init__(requests)
        self.longest, self.shortest = longest, shortest

    def continuation(self, salt, tokens, n):
        for size in range(self.longest, self.shortest - 1, -1):
            places = self.places(salt, tokens, size)
            for text, at in places:
                if text is tokens:
                    read = list(tokens)
                    while len(read) < len(tokens) + n:
                        read.append(read[at + len(read) - len(tokens)])
                    return self.weighed(tokens, read[len(tokens) :], text[:at], places)
        places = self.places(salt, tokens, self.longest)
        for text, at in places:
            return self.weighed(tokens, text[at : at + n], text[:at], places)
        return Draft([], [])

    def weighed(self, tokens, draft, before, places):
        agreed = sum(text[at] == draft[0] for text, at in places) / len(places)
        context = self.context(tokens, before, COMPARED)
        return graded(draft, [agreed * ((context + i) / (context + i + 1)) for i in range(len(draft))])


class NaiveSuffix(Naive):
    def __init__(self, depth: int, factor: float, least: float, requests: int) -> None:
        super().__init__(requests)
        self.depth, self.factor, self.least = depth, factor, least

    def continuation(self, salt, tokens, n):
        places = next((found for size in RUNS if (found := self.places(salt, tokens, size))), [])
        voices = [(self.likeness(tokens, text[:at]), text, at) for text, at in places]
        longest = max((length for length, _, _ in voices), default=0)
        draft, rights, certainty = [], [], 1.0
        while len(draft) < min(n, int(self.factor * longest)):
            said = []
            for length, text, at in voices:
                known = tokens + draft if text is tokens else text
                if at + len(draft) < len(known):
                    said.append((length, text, at, known[at + len(draft)]))
            if not said:
                break
            votes = {}
            for length, _, _, token in said:
                votes[token] = votes.get(token, 0) + length**2
            winner = max(votes, key=lambda token: votes[token])
            context = len(draft) + max(length for length, _, _, token in said if token == winner)
            right = votes[winner] / sum(votes.values()) * (context / (context + 1))
            certainty *= right
            if certainty < self.least:
                break
            draft.append(winner)
            rights.append(right)
            voices = [(length, text, at) for length, text, at, token in said if token == winner]
        return graded(draft, rights)

    def likeness(self, tokens, before):
        length = self.context(tokens, before, self.depth)
        if length >= RUNS[0]:
            return length
        ours = tokens[: len(tokens) - length][::-1][:NEAR]
        theirs = before[: len(before) - length][::-1][:NEAR]
        both = set(ours) & set(theirs)
        return length + NEARBY_WEIGHT * sum(abs(ours.index(token) - theirs.index(token)) <= SLACK for token in both)
