"""Numbered and bulleted lists, short and long, whose items never repeat."""

from __future__ import annotations

from random import Random

from . import words as w

POOLS: dict[str, list[str]] = {
    "animals": w.ANIMALS, "colours": w.COLOURS, "foods": w.FOODS, "hobbies": w.HOBBIES, "jobs": w.JOBS,
    "cities": w.CITIES, "names": w.NAMES, "places": w.PLACES, "things": w.OBJECTS, "days of the week": w.DAYS,
    "months": w.MONTHS,
}  # fmt: skip
_VERBS = """Wash|Paint|Repair|Find|Clean|Carry|Buy|Sell|Draw|Hide|Open|Close|Polish|Wrap|Count|Move|Check|Build|Bring|
Send|Borrow|Return|Photograph|Describe|Weigh|Measure|Decorate|Collect|Store|Label""".replace("\n", "").split("|")
_WHERE = """in the kitchen|in the garden|before lunch|with a friend|on Monday|in the evening|near the window|for Anna|
at the market|under the table|in the attic|with a smile|before it rains|after breakfast|on the balcony|for the party|
next to the door|in the workshop|by the river|without help""".replace("\n", "").split("|")


def tasks(rng: Random, count: int) -> list[str]:
    """Different small tasks; verbs, things and places are dealt like cards, so neighbours never repeat."""
    decks: list[list[str]] = [[], [], [], []]
    items = []
    for _ in range(count):
        words = []
        for deck, pool in zip(decks, (_VERBS, w.COLOURS + w.ADJECTIVES, w.OBJECTS, _WHERE), strict=True):
            if not deck:
                deck.extend(rng.sample(pool, len(pool)))
            words.append(deck.pop())
        items.append(f"{words[0]} the {words[1]} {words[2]} {words[3]}.")
    return items


def numbered(items: list[str]) -> str:
    """Items as `1. ...` lines."""
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def short(rng: Random) -> tuple[str, str]:
    """List 3 to 10 things of a kind."""
    kind = rng.choice(list(POOLS))
    pool = POOLS[kind]
    if kind in ("days of the week", "months"):
        ask = rng.choice(["List the {}.", "Name the {}.", "What are the {}?"]).format(kind)
        return ask, numbered(pool)
    count = rng.randint(3, 10)
    if rng.random() < 0.12:
        first = rng.choice((1, 1, 1, rng.randint(2, 50)))
        last = first + rng.randint(3, 19)
        if rng.random() < 0.25:
            ask = f"Count down from {last} to {first}."
            return ask, ", ".join(str(i) for i in range(last, first - 1, -1)) + "."
        return f"Count from {first} to {last}.", ", ".join(str(i) for i in range(first, last + 1)) + "."
    items = [w.capital(item) for item in rng.sample(pool, count)]
    number = rng.choice((str(count), w.NUMBER_WORDS[count]))
    style = rng.randrange(3)
    if style == 0:
        ask = rng.choice(["Name {} {}.", "Tell me {} {}.", "Give me {} {}."]).format(number, kind)
        return ask, w.join(
            [items[0], *[item if kind in ("cities", "names") else item.lower() for item in items[1:]]]
        ) + "."
    if style == 1:
        return f"Write a bulleted list of {number} {kind}.", "\n".join("- " + item for item in items)
    ask = rng.choice(["List {} {}.", "Write a list of {} {}.", "Make a numbered list of {} {}.", "List {} {} please."])
    return ask.format(number, kind), numbered(items)


def long(rng: Random) -> tuple[str, str]:
    """A numbered list of 20 to 70 different items."""
    style = rng.randrange(4)
    if style == 0:
        count = rng.choice((30, 40, 50, 60, 100))
        ask = rng.choice(["Count from 1 to {}.", "Count to {}.", "Write the numbers from 1 to {}."]).format(count)
        return ask, ", ".join(str(i) for i in range(1, count + 1)) + "."
    if style == 1:
        kind, pool = rng.choice(
            [("names", w.NAMES), ("animals", w.ANIMALS), ("things", w.OBJECTS), ("places", w.PLACES)]
        )
        count = rng.choice((20, 25, 30, 40))
        ask = rng.choice(["List {} {}.", "Write a long list of {} {}.", "Make a numbered list of {} {}."])
        return ask.format(count, kind), numbered([w.capital(item) for item in rng.sample(pool, count)])
    count = rng.choice((20, 25, 30, 40, 50, 60, 70))
    ask = rng.choice(["Write a list of {} tasks.", "Give me {} things to do.",
                      "Make a numbered list of {} small tasks.",
                      "Write a to-do list with {} items.", "List {} things to do at home."]).format(count)  # fmt: skip
    if rng.random() < 0.3:
        ask = rng.choice(
            ["Write a long to-do list.", "Write a long numbered list.", "Write a very long list of tasks."]
        )
    return ask, numbered(tasks(rng, count))


_STEPS: list[tuple[str, list[str]]] = [
    ("make tea", ["Boil the water.", "Put the tea into a cup.", "Pour the hot water over it.", "Wait three minutes.",
     "Enjoy your tea."]),
    ("plant a tree", ["Choose a sunny place.", "Dig a deep hole.", "Put the tree into the hole.",
     "Fill the hole with earth.", "Water the tree."]),
    ("bake bread", ["Mix flour, water, salt and yeast.", "Knead the dough.", "Let it rest for an hour.",
     "Bake it for forty minutes.", "Let it cool."]),
    ("cook pasta", ["Boil water with salt.", "Add the pasta.", "Cook it for ten minutes.", "Drain the water.",
     "Serve it with sauce."]),
    ("wash a car", ["Rinse the car with water.", "Wash it with soap.", "Clean the windows.", "Rinse it again.",
     "Dry it with a cloth."]),
    ("clean a room", ["Open the window.", "Put everything in its place.", "Dust the shelves.", "Sweep the floor.",
     "Close the window."]),
    ("write a letter", ["Take a sheet of paper.", "Write the date.", "Greet the reader.", "Say what you want to say.",
     "Sign your name."]),
    ("learn a language", ["Learn ten words every day.", "Listen to the language.", "Speak with a friend.",
     "Read easy books.", "Be patient."]),
    ("start phalanx", ["Install phalanx.", "Run phalanx doctor.", "Run phalanx serve.",
     "Send a request to port 8000."]),
]  # fmt: skip


def steps(rng: Random) -> tuple[str, str]:
    """How to do something, in steps."""
    what, how = rng.choice(_STEPS)
    ask = rng.choice(
        ["How do I {}?", "Explain how to {}.", "How can I {}?", "Write the steps to {}.", "How do you {}?"]
    )
    return ask.format(what), numbered(how)
