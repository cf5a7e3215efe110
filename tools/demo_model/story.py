"""Stories that progress: a fixed order of scenes, each a row of slots with interchangeable sentences.

The order of scenes is what keeps a small model from looping: after the storm always comes something else. Episodes in
the middle are numbered and drawn without replacement, so a story can be 80 or 1,500 tokens long.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from . import words as w
from .scenes import ENDING, EPISODE, HELPERS, MIDDLE, OPENING, PROBLEMS, SHORT


@dataclass
class Cast:
    """Who and what a story is about."""

    hero: str
    kind: str
    thing: str
    thing_is_place: bool
    he: str
    his: str
    him: str

    def fields(self) -> dict[str, str]:
        """Template fields; `Hero` is the name, `kind` what it is, `thing` the other subject."""
        return {"Hero": self.hero, "kind": self.kind, "thing": self.thing, "he": self.he, "He": self.he.capitalize(),
                "his": self.his, "His": self.his.capitalize(), "him": self.him, "a_kind": w.a(self.kind),
                "a_thing": w.a(self.thing)}  # fmt: skip


def draw_cast(rng: Random, name: str | None = None) -> Cast:
    """A random hero and a random place or object."""
    kind = rng.choice(w.ANIMALS if rng.random() < 0.6 else w.PEOPLE)
    thing_is_place = rng.random() < 0.55
    thing = rng.choice(w.PLACES if thing_is_place else w.OBJECTS)
    female = kind in ("girl", "queen", "princess", "witch", "grandmother")
    male = kind in ("boy", "king", "prince", "fisherman", "postman", "wizard")
    she = female or (not male and rng.random() < 0.5)
    he, his, him = ("she", "her", "her") if she else ("he", "his", "him")
    return Cast(name or w.person(rng, 0.2), kind, thing, thing_is_place, he, his, him)


def _scene(rng: Random, slots: list[list[str]], fields: dict[str, str], keep: float = 1.0) -> str:
    """One paragraph: one sentence per slot (slots after the first are kept with probability `keep`)."""
    chosen = [rng.choice(slot) for number, slot in enumerate(slots) if number == 0 or rng.random() < keep]
    return " ".join(chosen).format(**fields)


def _episodes(rng: Random, fields: dict[str, str], count: int) -> list[str]:
    """Numbered meetings on the road, each with its own helper, place, problem and gift."""
    helpers = rng.sample(HELPERS, count)
    problems = rng.sample(PROBLEMS, count)
    places = rng.sample([p for p in w.PLACES if p != fields["thing"]], count)
    gifts = rng.sample([o for o in w.OBJECTS if o != fields["thing"]], count)
    names = [n for n in w.people(rng, count + 1) if n != fields["Hero"]][:count]
    paragraphs = []
    for number in range(count):
        helper = helpers[number]
        problem, solution = problems[number]
        adjective = rng.choice(w.ADJECTIVES)
        local = {
            **fields, "nth": w.ORDINALS[number], "helper": helper, "a_helper": w.a(helper), "place": places[number],
            "a_place": w.a(places[number]), "gift": gifts[number], "a_gift": w.a(adjective + " " + gifts[number]),
            "Friend": names[number], "adj": adjective,
        }  # fmt: skip
        local["problem"] = problem.format(**local)
        local["solution"] = solution.format(**local)
        paragraphs.append(_scene(rng, EPISODE, local, 0.9))
    return paragraphs


def paragraphs(rng: Random, cast: Cast, length: str) -> list[str]:
    """The paragraphs of a story: `short` (one), `medium` (4 to 6) or `long` (12 to 18)."""
    fields = cast.fields()
    fields["friend_name"] = next(n for n in w.people(rng, 2) if n != cast.hero)
    fields["friend_kind"] = rng.choice([k for k in w.ANIMALS if k != cast.kind])
    fields["a_friend_kind"] = w.a(fields["friend_kind"])
    fields["adj1"], fields["adj2"] = rng.sample(w.ADJECTIVES, 2)
    fields["a_adj1"] = w.a(fields["adj1"])
    fields["food"], fields["food2"] = rng.sample(w.FOODS, 2)
    fields["colour"] = rng.choice(w.COLOURS)
    key = "place" if cast.thing_is_place else "object"
    if length == "short":
        return [_scene(rng, SHORT[key], fields, 0.9)]
    opening = _scene(rng, OPENING[key], fields)
    ending = [_scene(rng, slots, fields) for slots in ENDING[key]]
    if length == "medium":
        packing, friend, *landscape = MIDDLE
        middle = [_scene(rng, packing, fields, 0.6)] if rng.random() < 0.5 else []
        middle.append(_scene(rng, friend, fields, 0.8))
        middle += [_scene(rng, rng.choice(landscape), fields, 0.7)] if rng.random() < 0.5 else []
        return [opening, *middle, *_episodes(rng, fields, rng.choice((1, 2))), ending[0], ending[-1]]
    middle = [_scene(rng, slots, fields, 0.95) for slots in MIDDLE]
    return [opening, *middle, *_episodes(rng, fields, rng.randint(4, 9)), *ending]


def story(rng: Random, cast: Cast, length: str, title: bool = False) -> str:
    """The story as text, paragraphs separated by a blank line."""
    body = "\n\n".join(paragraphs(rng, cast, length))
    if title:
        return f"The {w.capital(cast.kind)} and the {w.capital(cast.thing)}\n\n{body}"
    return body


_LONG = [
    "Write a long story about {a_kind} and {a_thing}.",
    "Write a long story about {a_kind} and {a_thing}.",
    "Tell me a long story about {a_kind} and {a_thing}.",
    "Write 600 words about {a_kind} and {a_thing}.",
    "Write {count} words about {a_kind} and {a_thing}.",
    "Write a story of {count} words about {a_kind}.",
    "Please write a very long story about {a_kind}.",
    "Write a long story about {a_kind} named {Hero}.",
    "Can you write a long tale about {a_thing}?",
    "Write a 600 word story about {a_kind} and {a_thing}.",
    "Write a long story.",
    "Tell me a long story.",
    "Write a long fairy tale.",
]
_MEDIUM = [
    "Tell me a story.",
    "Tell me a story.",
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_kind} and {a_thing}.",
    "Write a story about {a_thing}.",
    "Write a story about {a_kind} named {Hero}.",
    "Can you tell me a story?",
    "Please tell me a story about {Hero} the {kind}.",
    "I would like to hear a story about {a_kind}.",
    "Make up a story about {a_kind} who finds {a_thing}.",
]
_SHORT = [
    "Tell me a short story.",
    "Tell me a short story about {a_kind}.",
    "Write a short story about {a_kind} and {a_thing}.",
    "Write a very short story about {a_thing}.",
    "Can you tell me a short story about {a_kind} named {Hero}?",
    "Tell a tiny story about {Hero} the {kind}.",
    "Write a few sentences about {a_kind} and {a_thing}.",
]


def request(rng: Random, length: str, name: str | None = None) -> tuple[str, str]:
    """A user's request for a story, and the story."""
    cast = draw_cast(rng, name)
    pool = {"short": _SHORT, "medium": _MEDIUM, "long": _LONG}[length]
    prompt = rng.choice(pool).format(**cast.fields(), count=rng.choice((400, 500, 600, 700, 800, 1000)))
    return prompt, story(rng, cast, length)


def document(rng: Random, length: str) -> str:
    """A plain story document, for raw completion."""
    return story(rng, draw_cast(rng), length, title=rng.random() < 0.25)
