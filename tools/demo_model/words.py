"""Word pools and the small grammar helpers that every generator shares. Knows nothing about documents."""

from __future__ import annotations

from random import Random

NAMES = """
Ada Alan Alice Amir Anna Anton Aria Ben Bella Boris Bruno Cara Carl Chen Chloe Clara Dan Dana David Diego Dora
Ed Elena Eli Ella Emil Emma Erik Eva Farah Felix Finn Fiona Frank Freya George Gina Grace Greta Hana Hanna Hasan Hugo
Ida Igor Ines Iris Ivan Ivy Jack Jakob Jan Jane Jonas Julia Kai Kara Karl Kate Kenji Lara Lars Lea Leo Lena Lila Lina
Liam Lucas Lucy Luis Maja Marco Maria Mark Marta Max Maya Mia Mila Milo Mina Mira Nadia Nina Noah Nora Olga Oliver Omar
Oscar Otto Paul Pedro Petra Pia Quinn Ravi Rita Rosa Ruth Sam Sara Sofia Stella Tara Theo Tim Tom Uma Vera Victor Viola
Walter Wanda Will Yara Yuki Zoe Zora Priya Leila Bob John Mary Peter Susan Kim""".split()
_ONSETS = "b br d dr f g gr h j k kl l m n p r s sh st t tr v w z th".split()
_VOWELS = "a e i o u ai ea ia".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "m", "x"]
_UNWANTED = (
    "pen",
    "pis",
    "fat",
    "sex",
    "shi",
    "tit",
    "ass",
    "dik",
    "nig",
    "nag",
    "neg",
    "kak",
    "poo",
    "bum",
    "rap",
    "hit",
    "jap",
    "jew",
    "fag",
    "vag",
    "sla",
    "dum",
)

ANIMALS = """
fox bear wolf rabbit owl cat dog mouse turtle frog hedgehog squirrel badger otter deer crow goose duck heron
beaver goat sheep horse donkey pony lion tiger elephant monkey parrot penguin seal whale dolphin crab snail bee ant
spider lizard dragon robin swan eagle raven mole bat sparrow camel kitten puppy hare lynx octopus""".split()
PEOPLE = """baker sailor farmer teacher painter clockmaker fisherman gardener miller tailor king queen prince princess
knight wizard witch girl boy grandmother carpenter miner pilot doctor librarian robot shepherd musician cook potter
weaver traveller inventor merchant postman astronomer captain""".split()
PLACES = """lighthouse forest village castle island mountain river harbour bridge tower garden library mill cave desert
market valley lake meadow farm school station museum bakery swamp hill city beach orchard workshop mine temple windmill
ship canyon waterfall monastery palace tavern barn theatre""".split()
OBJECTS = """lantern key map clock boat kite letter crown mirror stone compass drum flute ring bell book candle coin
feather hat ladder lamp needle painting pearl rope scarf shell shoe sword telescope violin wheel whistle basket blanket
bottle box button chest cloak cup egg lute mask seed spoon star teapot umbrella wagon""".split()
COLOURS = "red blue green yellow white black brown purple orange pink grey silver golden".split()
ADJECTIVES = """old small tall quiet bright strange gentle brave clever lonely cheerful tiny heavy broken shiny dusty
wooden warm cold soft round ancient narrow secret proud tired curious wild kind patient""".split()
FOODS = """bread soup apples cheese honey pears plums rice beans noodles pancakes pie cake berries nuts fish potatoes
carrots tea salad porridge dumplings cherries grapes mushrooms""".split()
HOBBIES = """painting swimming reading cooking running chess music dancing gardening cycling sailing photography
drawing climbing knitting fishing hiking singing football tennis astronomy pottery""".split()
JOBS = """teacher nurse doctor farmer baker engineer painter driver pilot cook student lawyer librarian musician
gardener carpenter scientist dentist plumber waiter programmer writer""".split()
CITIES = """Paris London Berlin Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Cairo Tokyo Boston Chicago Toronto
Sydney Lima Nairobi Mumbai Seoul Zurich Munich Hamburg Porto Bern Geneva Milan Helsinki Warsaw""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
ORDINALS = """first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
fifteenth""".split()
VARIABLES = """x y z a b c n m k total count value result item number size length name index left right data score price
width height speed weight limit step start end base temp answer""".split()


def made_up(rng: Random) -> str:
    """A capitalised name that is in no list, so that copying it must be learned, not memorised."""
    while True:
        syllables = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2))))
        name = syllables + rng.choice(_ONSETS)[0] + rng.choice("aeiou") + rng.choice(_CODAS)
        if not any(part in name for part in _UNWANTED):
            return name.capitalize()


def person(rng: Random, invented: float = 0.25) -> str:
    """A person's name: known, or invented with the given probability."""
    return made_up(rng) if rng.random() < invented else rng.choice(NAMES)


def people(rng: Random, count: int) -> list[str]:
    """Several different names."""
    names: list[str] = []
    while len(names) < count:
        name = person(rng)
        if name not in names:
            names.append(name)
    return names


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith("one") else "a ") + noun


def join(items: list[str]) -> str:
    """`x`, `x and y`, or `x, y and z`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def plural(noun: str) -> str:
    """A regular plural, with the few exceptions the pools contain."""
    special = {"mouse": "mice", "goose": "geese", "sheep": "sheep", "deer": "deer", "fish": "fish", "wolf": "wolves"}
    if noun in special:
        return special[noun]
    if noun.endswith("man"):
        return noun[:-3] + "men"
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def casual(rng: Random, ask: str) -> str:
    """The question as typed in a hurry: now and then without its capital or its last mark."""
    if rng.random() < 0.1 and not ask.startswith(("I ", "I'")):
        ask = ask[:1].lower() + ask[1:]
    if rng.random() < 0.1 and ask.endswith(("?", ".", "!")):
        ask = ask[:-1]
    return ask


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
