"""A few plain facts about the world, and honest answers to everything else."""

from __future__ import annotations

from random import Random

from . import words as w

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Egypt": "Cairo", "Japan": "Tokyo",
    "Ireland": "Dublin", "Norway": "Oslo", "Finland": "Helsinki", "England": "London", "Peru": "Lima",
    "China": "Beijing", "India": "New Delhi", "Russia": "Moscow", "Turkey": "Ankara", "Belgium": "Brussels",
    "Switzerland": "Bern", "Australia": "Canberra", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Kenya": "Nairobi", "Canada": "Ottawa", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Hungary": "Budapest",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "old": "young", "happy": "sad",
    "light": "dark", "open": "closed", "early": "late", "full": "empty", "hard": "soft", "left": "right", "wet": "dry",
    "loud": "quiet", "high": "low", "long": "short", "yes": "no", "good": "bad", "rich": "poor", "strong": "weak",
}  # fmt: skip
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "sheep": "bleats",
    "duck": "quacks",
    "lion": "roars",
    "bee": "buzzes",
    "wolf": "howls",
    "crow": "caws",
    "frog": "croaks",
    "horse": "neighs",
    "snake": "hisses",
}
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a lemon": "yellow",
    "blood": "red",
    "coal": "black",
    "a banana": "yellow",
    "an orange": "orange",
    "the sun": "yellow",
    "milk": "white",
    "a leaf": "green",
}
FACTS: list[tuple[list[str], str]] = [
    (["How many days are in a week?", "How many days does a week have?"], "A week has seven days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has twelve months."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], "An hour has 60 minutes."),
    (["How many legs does a spider have?"], "A spider has eight legs."),
    (["How many legs does a dog have?", "How many legs does a cat have?"], "It has four legs."),
    (["What do bees make?"], "Bees make honey."),
    (["What is the sun?"], "The sun is a star."),
    (["What is water made of?"], "Water is made of hydrogen and oxygen."),
    (["What is Python?", "What is the Python language?"], "Python is a programming language."),
    (["What is Linux?"], "Linux is an operating system."),
    (["What is a computer?"], "A computer is a machine that follows instructions and works with data."),
    (["What is a GPU?"], "A GPU is a processor that does many calculations at the same time."),
    (["What is a CPU?"], "A CPU is the main processor of a computer."),
    (["What is a language model?", "What is an LLM?", "What does LLM mean?"],
     "A language model is a program that predicts the next token of a text."),
    (["What is a token?", "What is a token in a language model?"],
     "A token is a small piece of text, often a word or a part of a word."),
]  # fmt: skip
_TOPICS = """
black holes|gravity|inflation|DNA|photosynthesis|the French Revolution|philosophy|chemistry|the stock market|
politics|economics|dinosaurs|the human brain|evolution|electricity|love|history|biology|the Roman Empire|vitamins|
climate change|democracy|the internet|volcanoes|space travel|mathematics|poetry|religion|law""".replace("\n", "").split(
    "|"
)
_UNKNOWN_ASK = [
    "Who is the president of {land}?", "Who is the king of {land}?", "How many people live in {land}?",
    "Explain {topic}.", "What is {topic}?", "Tell me about {topic}.", "How does {topic} work?",
    "Why is {topic} important?",
    "What do you think about {topic}?", "Write an essay about {topic}.", "Can you explain {topic}?",
    "What is the best {thing} in {city}?", "Can you recommend a book?", "Which film should I watch?",
    "What is the weather today?", "What time is it?", "What day is today?", "What is the date today?",
    "Who won the {thing} championship in {year}?", "Who is the president of {made}?", "What is the capital of {made}?",
    "When was {person} born?", "Who wrote the book {made}?", "What is the population of {city}?",
    "What is the weather in {city} today?", "Who invented the {thing}?", "How far is it from {city} to {city2}?",
    "What is the price of {a_thing}?", "Explain {made} theory.", "What happened in {year}?", "Who is {person} {made}?",
    "What is the latest news from {city}?", "How tall is {person}?", "What time is it in {city}?",
    "Translate {thing} into Latin.", "What does {made} mean?", "Who is the mayor of {city}?", "How old is {person}?",
    "Can you explain quantum physics?", "What is the meaning of life?", "Who painted the {thing}?",
    "What is the phone number of {person}?", "Tell me about {made}.", "What is {made}?", "Do you know {made}?",
    "How does {a_thing} work?", "What is the distance to the {colour} planet {made}?", "How do I repair {a_thing}?",
]  # fmt: skip
UNKNOWN_ANSWERS = [
    "I am a small demo model; I do not know that.",
    "I am a small demo model; I do not know that.",
    "I am a small demo model; I do not know that.",
    "I do not know that. I am only a small demo model.",
    "Sorry, I do not know that. I am a small demo model.",
    "I am not sure. I am a small demo model and know very little.",
]


def unknown(rng: Random) -> tuple[str, str]:
    """A question beyond the model, and a modest answer."""
    city, city2 = rng.sample(w.CITIES, 2)
    thing = rng.choice(w.OBJECTS)
    ask = rng.choice(_UNKNOWN_ASK).format(
        thing=thing, a_thing=w.a(thing), year=rng.randint(1200, 2030),
        land=rng.choice(list(CAPITALS)), topic=rng.choice(_TOPICS), made=w.made_up(rng), person=w.person(rng, 0.5),
        city=city, city2=city2, colour=rng.choice(w.COLOURS),
    )  # fmt: skip
    return w.casual(rng, ask), rng.choice(UNKNOWN_ANSWERS)


def question(rng: Random) -> tuple[str, str]:
    """A question about the world that the model can answer."""
    kind = rng.randrange(7)
    if kind == 0:
        land, city = rng.choice(list(CAPITALS.items()))
        ask = rng.choice(["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."])
        return ask.format(land), f"The capital of {land} is {city}."
    if kind == 1:
        word, other = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, other = other, word
        return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    if kind == 2:
        animal, sound = rng.choice(list(SOUNDS.items()))
        return f"What sound does {w.a(animal)} make?", f"{w.capital(w.a(animal))} {sound}."
    if kind == 3:
        thing, colour = rng.choice(list(COLOUR_OF.items()))
        ask = rng.choice(["What colour is {}?", "What color is {}?", "Which colour has {}?"])
        return ask.format(thing), f"{w.capital(thing)} is {colour}."
    if kind == 4:
        i = rng.randrange(7)
        if rng.random() < 0.5:
            return f"Which day comes after {w.DAYS[i]}?", f"After {w.DAYS[i]} comes {w.DAYS[(i + 1) % 7]}."
        return f"Which day comes before {w.DAYS[i]}?", f"Before {w.DAYS[i]} comes {w.DAYS[i - 1]}."
    if kind == 5:
        i = rng.randrange(12)
        return f"Which month comes after {w.MONTHS[i]}?", f"After {w.MONTHS[i]} comes {w.MONTHS[(i + 1) % 12]}."
    asks, answer = rng.choice(FACTS)
    return rng.choice(asks), answer
