"""Conversations: small talk, remembered facts and tasks, strung together over several turns."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import about, arithmetic, lists, snippets, story, world
from . import words as w

Turn = tuple[str, str]
Pair = tuple[str, str]

SYSTEMS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "Be concise.",
    "You are phalanx.",
    "You are a small demo model.", "You are a polite robot.", "Answer in one sentence.",
    "You are a helpful AI assistant.",
    "You are a teacher.", "Be kind and clear.", "You help people with their questions.",
    "You are an expert for phalanx.",
    "You are a storyteller.", "Answer the question of the user.",
]  # fmt: skip
_SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "Hello there.", "hello", "hi", "Good day!", "Hey there"],
     ["Hello! How can I help you?", "Hello! How can I help you?", "Hi! What can I do for you?"]),
    (["Good morning!", "Good morning"], ["Good morning! How can I help you?"]),
    (["Good evening!", "Good evening"], ["Good evening! How can I help you?"]),
    (["How are you?", "How are you today?", "How is it going?", "How do you do?", "Are you well?", "how are you"],
     ["I am fine, thank you. How are you?", "I am well, thank you. How are you?"]),
    (["I am fine.", "I am fine too.", "I'm good, thanks.", "Very well, thank you.", "I am great today!",
      "I feel good."],
     ["I am glad to hear that. What can I do for you?", "That is good to hear. How can I help you?"]),
    (["I am tired.", "I feel tired today.", "I had a long day."],
     ["I am sorry to hear that. I hope you can rest soon."]),
    (["I am sad.", "I feel sad today.", "I am not well."], ["I am sorry to hear that. Do you want to hear a story?"]),
    (["I am happy!", "I feel happy today.", "Today is a good day."],
      ["That is wonderful! I am glad that you are happy."]),
    (["Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "thanks", "Great, thanks.",
      "Perfect, thank you."],
     ["You are welcome!", "You are welcome!", "You are welcome! Is there anything else?"]),
    (["You are great.", "Well done!", "Good job!", "That was nice.", "I like your answer.", "Nice!", "Great!", "Cool!",
      "That is correct.", "Very good."], ["Thank you! I am happy to help.", "Thank you, that is kind of you."]),
    (["That is wrong.", "You are wrong.", "That is not right.", "No, that is wrong."],
     ["I am sorry. I am a small demo model and make mistakes."]),
    (["OK.", "Okay.", "I see.", "Ah, I understand.", "Good."], ["Is there anything else I can do for you?"]),
    (["Do you like music?", "Do you like animals?", "Do you like tea?", "Do you like rain?", "Do you have feelings?",
      "Do you sleep?", "Do you eat?"], ["I am a program, so I have no feelings, but I like to talk with you."]),
    (["Tell me a joke.", "Do you know a joke?", "Can you tell me a joke?", "Tell me something funny."],
     ["Why did the rank cross the network? To get to the other side of the all-reduce."]),
    (["Tell me something.", "Tell me something interesting.", "Tell me a fact."],
     ["Bees make honey, and a spider has eight legs.", "A week has seven days, and a year has twelve months."]),
    (["Let us talk.", "Can we talk?", "I want to talk.", "I am bored."],
      ["I would like that. What do you want to talk about?"]),
    (["Can you speak German?", "Do you speak French?", "Which languages do you speak?"], ["I speak only English."]),
    (["Please help me.", "I need help.", "Help!", "Can you do something for me?"], ["Of course. What do you need?"]),
    (["Sorry.", "I am sorry.", "Excuse me."], ["No problem. How can I help you?"]),
]  # fmt: skip
_BYE: Pair | list[tuple[list[str], list[str]]] = [
    (["Bye!", "Goodbye!", "Bye", "See you.", "See you later!", "Good bye.", "I have to go now. Bye!", "bye"],
     ["Goodbye! Have a nice day.", "Goodbye! Have a nice day.", "Bye! See you soon."]),
    (["Good night!", "Good night."], ["Good night! Sleep well."]),
]  # fmt: skip

_RECALL: dict[str, tuple[list[str], str, list[str], str, str]] = {
    # key: (ways to tell, acknowledgement, ways to ask, answer, answer when it was never told)
    "name": (["My name is {}.", "My name is {}.", "I am {}.", "I'm {}.", "Hi, my name is {}.", "Hello, I am {}.",
    "Call me {}.",
              "Hello! My name is {}.", "my name is {}"],
             "Nice to meet you, {}!",
             ["What is my name?", "What is my name?", "What's my name?", "Do you remember my name?", "Who am I?",
              "Do you know my name?", "Can you tell me my name?", "what is my name"],
             "Your name is {}.", "I do not know your name yet."),
    "city": (["I live in {}.", "I am from {}.", "My home is in {}.", "I come from {}."],
             "{} sounds like a nice place.",
             ["Where do I live?", "Where am I from?", "Which city do I live in?", "Do you remember where I live?"],
             "You live in {}.", "I do not know where you live."),
    "colour": (["My favourite colour is {}.", "My favorite color is {}.", "I love the colour {}.",
    "I like {} best of all colours."],
               "{} is a beautiful colour.",
               ["What is my favourite colour?", "What is my favorite color?", "Which colour do I like?"],
               "Your favourite colour is {}.", "I do not know your favourite colour."),
    "food": (["My favourite food is {}.", "I like to eat {}.", "I love {}.", "My favorite food is {}."],
             "{}, that sounds delicious.",
             ["What is my favourite food?", "What do I like to eat?", "Which food do I like?",
              "What is my favorite food?"],
             "You like {}.", "I do not know what you like to eat."),
    "hobby": (["My hobby is {}.", "I like {}.", "I enjoy {}.", "In my free time I do some {}."],
              "{} is a nice hobby.",
              ["What is my hobby?", "What do I enjoy?", "Do you remember my hobby?"],
              "Your hobby is {}.", "I do not know your hobby."),
    "job": (["I am {a}.", "I work as {a}.", "My job is: {}."],
            "That is an interesting job.",
            ["What is my job?", "What do I work as?", "Do you know my job?"],
            "You work as {a}.", "I do not know your job."),
    "pet": (["I have a dog named {}.", "My dog is called {}.", "My dog's name is {}."],
            "{} is a good name for a dog.",
            ["What is my dog's name?", "What is the name of my dog?", "How is my dog called?"],
            "Your dog is called {}.", "I do not know the name of your dog."),
    "cat": (["I have a cat named {}.", "My cat is called {}.", "My cat's name is {}."],
            "{} is a good name for a cat.",
            ["What is my cat's name?", "What is the name of my cat?", "How is my cat called?"],
            "Your cat is called {}.", "I do not know the name of your cat."),
    "number": (["My lucky number is {}.", "Remember the number {}.", "My number is {}.",
    "Please remember the number {}."],
               "I will remember the number {}.",
               ["What is my number?", "Which number did I tell you?", "What was the number?",
                "What is my lucky number?"],
               "Your number is {}.", "You have not told me a number."),
    "word": (["The secret word is {}.", "Remember the word {}.", "Please remember this word: {}."],
             "I will remember the word {}.",
             ["What is the secret word?", "Which word did I tell you?", "What was the word?"],
             "The word is {}.", "You have not told me a word."),
}  # fmt: skip


def _value(rng: Random, key: str) -> str:
    """A value for one kind of remembered fact."""
    if key == "number":
        return str(rng.randint(0, 9999))
    if key in ("name", "pet", "cat"):
        return w.person(rng, 0.4)
    pool = {
        "city": w.CITIES,
        "colour": w.COLOURS,
        "food": w.FOODS,
        "hobby": w.HOBBIES,
        "job": w.JOBS,
        "word": w.OBJECTS,
    }[key]
    return rng.choice(pool)


def _fill(template: str, value: str) -> str:
    """Insert a value; at the start of a sentence it gets a capital."""
    text = template.replace("{a}", w.a(value)).replace("{}", value)
    return w.capital(text) if template.startswith("{}") else text


_RHYMES = """day way|night light|sea free|tree bee|rain again|moon soon|sky high|hill still|snow go|bell well|star far|
house mouse|bread bed|stone alone|spring sing|door more|sun run|shore before""".replace("\n", "").split("|")


def poem(rng: Random) -> Pair:
    """Four rhymed lines."""
    kind, thing = rng.choice(w.ANIMALS), rng.choice(w.PLACES)
    (one, two), (three, four) = (pair.split() for pair in rng.sample(_RHYMES, 2))
    ask = rng.choice(
        ["Write a poem about {}.", "Write a short poem about {}.", "Can you write a poem about {}?"]
    ).format(w.a(kind))
    lines = [
        rng.choice(
            ["The {k} looks up and sees the {r},", "A {k} was walking by the {r},", "The {k} remembers every {r},"]
        ),
        rng.choice(
            ["and quietly it finds the {r}.", "and in the {t} it hears the {r}.", "and nothing is as good as the {r}."]
        ),
        rng.choice(
            ["It sings a song about the {r},", "It asks the wind, it asks the {r},", "It dreams of apples and the {r},"]
        ),
        rng.choice(
            [
                "and all the world becomes its {r}.",
                "and then it goes home to the {r}.",
                "and tells the {t} about the {r}.",
            ]
        ),
    ]
    text = "\n".join(line.format(k=kind, t=thing, r=r) for line, r in zip(lines, (one, two, three, four), strict=True))
    return ask, text


def linked(rng: Random) -> list[Pair]:
    """Small talk in which one turn answers the one before."""
    kind = rng.randrange(6)
    if kind == 0:
        asks, answers = _SMALL_TALK[3]
        return [(rng.choice(asks), rng.choice(answers)), (rng.choice(_SMALL_TALK[4][0]), rng.choice(_SMALL_TALK[4][1]))]
    if kind == 1:
        asks, answers = _SMALL_TALK[6]
        yes = rng.choice(["Yes, please.", "Yes!", "Yes, tell me a story.", "That would be nice."])
        return [(rng.choice(asks), answers[0]), (yes, story.request(rng, "short")[1])]
    if kind == 2:
        no = rng.choice(["No, thank you.", "No, that is all.", "No.", "That was all."])
        return [task(rng), (rng.choice(_SMALL_TALK[8][0]), "You are welcome! Is there anything else?"),
                (no, "All right. Have a nice day!")]  # fmt: skip
    if kind == 3:
        return [arithmetic.question(rng), *(arithmetic.follow_up(rng) for _ in range(rng.randint(1, 3)))]
    ask, answer = task(rng)
    while len(ask) + len(answer) > 400:
        ask, answer = task(rng)
    if kind == 4:
        again = rng.choice(["Say that again.", "Repeat your last answer.", "Can you repeat that?",
        "Please repeat that.",
                            "Once more, please."])  # fmt: skip
        return [(ask, answer), (again, answer)]
    what = rng.choice(["What did I ask?", "What was my last question?", "What did I just say?", "Repeat my question."])
    return [(ask, answer), (what, f"You said: {ask}")]


def small_talk(rng: Random) -> Pair:
    """One exchange of small talk."""
    asks, answers = rng.choice(_SMALL_TALK)
    return w.casual(rng, rng.choice(asks)), rng.choice(answers)


TASKS: list[tuple[float, Callable[[Random], Pair]]] = [
    (8.0, arithmetic.question), (0.5, arithmetic.bare_question), (0.7, arithmetic.word_problem),
     (0.7, arithmetic.compare), (0.5, arithmetic.in_words),
    (0.25, poem),
    (0.15, arithmetic.table), (10.0, about.question), (1.2, world.question), (1.5, world.unknown), (1.0, lists.short),
    (0.4, lists.steps), (1.2, snippets.code), (1.0, snippets.rename), (3.5, snippets.repeat), (0.7, snippets.record),
    (0.8, snippets.extract), (1.3, snippets.lookup), (0.5, snippets.transform),
    (0.7, lambda rng: story.request(rng, "short")),
]  # fmt: skip


def task(rng: Random) -> Pair:
    """One question or task with its answer."""
    (chosen,) = rng.choices([f for _, f in TASKS], [weight for weight, _ in TASKS])
    return chosen(rng)


def _system(rng: Random, probability: float) -> list[Turn]:
    """Perhaps a system prompt."""
    if rng.random() >= probability:
        return []
    if rng.random() < 0.6:
        return [("system", rng.choice(SYSTEMS))]
    character = f"You are {w.a(rng.choice(w.ADJECTIVES))} {rng.choice(w.PEOPLE + w.JOBS)}."
    return [("system", rng.choice([character, f"{character} {rng.choice(SYSTEMS)}",
                                   f"{rng.choice(SYSTEMS)} {character}",
                                   f"{character} Always answer like {w.a(rng.choice(w.PEOPLE))}."]))]  # fmt: skip


def _turns(pairs: list[Pair]) -> list[Turn]:
    """Pairs as alternating turns."""
    return [turn for ask, answer in pairs for turn in (("user", ask), ("assistant", answer))]


def single(rng: Random) -> list[Turn]:
    """One task and its answer."""
    return _system(rng, 0.15) + _turns([task(rng)])


def session(rng: Random) -> list[Turn]:
    """Several unrelated tasks, with thanks between some of them."""
    pairs: list[Pair] = []
    if rng.random() < 0.4:
        pairs.append((rng.choice(_SMALL_TALK[0][0]), rng.choice(_SMALL_TALK[0][1])))
    for _ in range(rng.randint(1, 4)):
        pairs.append(task(rng))
        if rng.random() < 0.15:
            pairs.append(small_talk(rng))
        elif rng.random() < 0.15:
            pairs += linked(rng)
    if rng.random() < 0.3:
        pairs.append((rng.choice(_SMALL_TALK[9][0]), rng.choice(_SMALL_TALK[9][1])))
    return _system(rng, 0.15) + _turns(pairs)


def conversation(rng: Random) -> list[Turn]:
    """A talk in which the user tells things about themselves and later asks for them."""
    pairs: list[Pair] = []
    known: dict[str, str] = {}
    if rng.random() < 0.4:
        pairs.append((rng.choice(_SMALL_TALK[0][0]), rng.choice(_SMALL_TALK[0][1])))
    keys = ["name"] * (rng.random() < 0.75) + rng.sample([k for k in _RECALL if k != "name"], rng.randint(0, 2))
    plan: list[tuple[str, str]] = []
    for key in keys:
        plan.append(("tell", key))
        if rng.random() < 0.08:
            plan += [("filler", ""), ("tell", key)]
        plan += [("filler", "")] * rng.choice((0, 0, 1, 1, 2))
        if rng.random() < 0.8:
            plan.append(("ask", key))
    if len(keys) > 1:
        plan += [("ask", key) for key in rng.sample(keys, rng.randint(0, len(keys)))]
    if rng.random() < 0.15:
        plan.insert(0, ("ask", rng.choice(list(_RECALL))))
    for kind, key in plan:
        if kind == "filler":
            pairs.append(small_talk(rng) if rng.random() < 0.6 else task(rng))
            continue
        tell, acknowledge, ask, answer, never = _RECALL[key]
        if kind == "tell":
            known[key] = _value(rng, key)
            pairs.append((_fill(rng.choice(tell), known[key]), _fill(acknowledge, known[key])))
        else:
            pairs.append((rng.choice(ask), _fill(answer, known[key]) if key in known else never))
    if rng.random() < 0.4 or not pairs:
        asks, answers = rng.choice(_BYE)
        pairs.append((rng.choice(asks), rng.choice(answers)))
    return _system(rng, 0.15) + _turns(pairs)


def storytelling(rng: Random) -> list[Turn]:
    """A request for a story of medium length, sometimes with talk around it."""
    pairs = [story.request(rng, "medium")]
    if rng.random() < 0.3:
        pairs.insert(0, small_talk(rng))
    if rng.random() < 0.3:
        pairs.append((rng.choice(_SMALL_TALK[9][0]), rng.choice(_SMALL_TALK[9][1])))
    return _system(rng, 0.1) + _turns(pairs)


def long_answer(rng: Random) -> list[Turn]:
    """One request with an answer of several hundred tokens."""
    if rng.random() < 0.7:
        return _system(rng, 0.1) + _turns([story.request(rng, "long")])
    return _system(rng, 0.1) + _turns([lists.long(rng)])


def small_talks(rng: Random) -> list[Turn]:
    """Only small talk."""
    pairs: list[Pair] = []
    for _ in range(rng.randint(1, 4)):
        pairs += linked(rng) if rng.random() < 0.3 else [small_talk(rng)]
    return _system(rng, 0.15) + _turns(pairs)
