"""Code, JSON and copying tasks: functions, renamed variables, records, repeated and extracted text."""

from __future__ import annotations

import json
import re
from random import Random

from . import words as w
from .lists import tasks

_PURPOSES: list[tuple[str, str, str]] = [
    ("adds two numbers", "add", "def {f}({a}, {b}):\n    return {a} + {b}"),
    ("subtracts two numbers", "subtract", "def {f}({a}, {b}):\n    return {a} - {b}"),
    ("multiplies two numbers", "multiply", "def {f}({a}, {b}):\n    return {a} * {b}"),
    ("doubles a number", "double", "def {f}({a}):\n    return {a} * 2"),
    ("squares a number", "square", "def {f}({a}):\n    return {a} * {a}"),
    ("returns the larger of two numbers", "larger",
     "def {f}({a}, {b}):\n    if {a} > {b}:\n        return {a}\n    return {b}"),
    ("returns the smaller of two numbers", "smaller",
     "def {f}({a}, {b}):\n    if {a} < {b}:\n        return {a}\n    return {b}"),
    ("checks if a number is even", "is_even", "def {f}({a}):\n    return {a} % 2 == 0"),
    ("checks if a number is odd", "is_odd", "def {f}({a}):\n    return {a} % 2 == 1"),
    ("sums a list", "total", "def {f}({a}):\n    {b} = 0\n    for {c} in {a}:\n        {b} += {c}\n    return {b}"),
    ("counts the items of a list", "count",
     "def {f}({a}):\n    {b} = 0\n    for {c} in {a}:\n        {b} += 1\n    return {b}"),
    ("finds the largest item of a list", "largest",
     "def {f}({a}):\n    {b} = {a}[0]\n    for {c} in {a}:\n        if {c} > {b}:\n            {b} = {c}\n"
     "    return {b}"),
    ("computes the factorial of a number", "factorial",
     "def {f}({a}):\n    {b} = 1\n    for {c} in range(1, {a} + 1):\n        {b} *= {c}\n    return {b}"),
    ("reverses a string", "reverse", "def {f}({a}):\n    return {a}[::-1]"),
    ("greets a person", "greet", "def {f}({a}):\n    return \"Hello, \" + {a} + \"!\""),
    ("prints the numbers from 1 to 10", "show", "def {f}():\n    for {a} in range(1, 11):\n        print({a})"),
    ("computes the average of a list", "average", "def {f}({a}):\n    return sum({a}) / len({a})"),
    ("counts the words of a text", "count_words", "def {f}({a}):\n    return len({a}.split())"),
    ("computes a Fibonacci number", "fibonacci",
     "def {f}({a}):\n    {b}, {c} = 0, 1\n    for _ in range({a}):\n        {b}, {c} = {c}, {b} + {c}\n    return {b}"),
]  # fmt: skip
_SHELL: list[tuple[str, str]] = [
    ("lists all files", "ls -la"), ("shows the current directory", "pwd"), ("prints hello", "echo hello"),
    ("makes a directory named {n}", "mkdir {n}"), ("removes the file {n}.txt", "rm {n}.txt"),
    ("copies {n}.txt to {m}.txt", "cp {n}.txt {m}.txt"), ("renames {n}.txt to {m}.txt", "mv {n}.txt {m}.txt"),
    ("counts the lines of {n}.txt", "wc -l {n}.txt"), ("finds the word {m} in {n}.txt", "grep {m} {n}.txt"),
    ("shows the first ten lines of {n}.txt", "head -n 10 {n}.txt"), ("sorts {n}.txt", "sort {n}.txt"),
    ("starts phalanx with two ranks", "phalanx serve MODEL --tp 2"), ("starts phalanx", "phalanx serve"),
    ("shows the free memory", "free -h"), ("shows the disk space", "df -h"),
]  # fmt: skip


def function(rng: Random) -> tuple[str, str, str]:
    """Purpose, canonical name and Python source of a small function."""
    purpose, name, template = rng.choice(_PURPOSES)
    a, b, c = rng.sample(w.VARIABLES, 3)
    if rng.random() < 0.5:
        a, b, c = "n", "result", "i"
        if "({a}, {b})" in template:
            a, b = "a", "b"
        elif "for {c} in {a}" in template or "sum(" in template:
            a, b, c = "items", "result", "item"
        elif "split" in template or "[::-1]" in template:
            a = "text"
        elif "Hello" in template:
            a = "name"
    return purpose, name, template.format(f=name, a=a, b=b, c=c)


def code(rng: Random) -> tuple[str, str]:
    """Write a function or a shell command."""
    if rng.random() < 0.25:
        n, m = rng.sample(w.OBJECTS, 2)
        what, command = rng.choice(_SHELL)
        ask = rng.choice(["Write a shell command that {}.", "Which shell command {}?", "Give me a command that {}."])
        return ask.format(what.format(n=n, m=m)), f"```sh\n{command.format(n=n, m=m)}\n```"
    purpose, _, source = function(rng)
    ask = rng.choice(["Write a Python function that {}.", "Write a function that {}.",
                      "Can you write a Python function that {}?",
                      "Please write Python code that {}.", "Show me a Python function that {}."])  # fmt: skip
    return ask.format(purpose), f"```python\n{source}\n```"


def _program(rng: Random) -> str:
    """One or two functions, or a few assignments."""
    if rng.random() < 0.4:
        names = rng.sample(w.VARIABLES, rng.randint(2, 4))
        lines = [f"{names[0]} = {rng.randint(0, 99)}"]
        for left, right in zip(names[1:], names, strict=False):
            lines.append(f"{left} = {right} {rng.choice('+-*')} {rng.randint(1, 20)}")
        lines.append(f"print({names[-1]})")
        return "\n".join(lines)
    return "\n\n".join(function(rng)[2] for _ in range(rng.choice((1, 1, 2, 3))))


def rename(rng: Random) -> tuple[str, str]:
    """Rewrite code with a variable renamed."""
    program = _program(rng)
    present = sorted({word for word in re.findall(r"[a-z_]+", program) if word in w.VARIABLES})
    old = rng.choice(present) if present else "print"
    new = rng.choice([v for v in w.VARIABLES if v not in program])
    ask = rng.choice(["Rewrite this code with variable {o} renamed to {n}:", "Rename {o} to {n} in this code:",
                      "Rewrite this code with the variable {o} renamed to {n}:", "Replace {o} by {n}:"])  # fmt: skip
    answer = re.sub(rf"\b{old}\b", new, program)
    return f"{ask.format(o=old, n=new)}\n```python\n{program}\n```", f"```python\n{answer}\n```"


def sentence(rng: Random) -> str:
    """A sentence with little meaning and much variety, for copying."""
    name, other = w.people(rng, 2)
    thing, thing2 = rng.sample(w.OBJECTS, 2)
    return rng.choice([
        f"{name} puts the {rng.choice(w.COLOURS)} {thing} next to the {thing2}.",
        f"The {rng.choice(w.ADJECTIVES)} {rng.choice(w.ANIMALS)} sleeps under the {thing}.",
        f"{name} and {other} go to the {rng.choice(w.PLACES)} on {rng.choice(w.DAYS)}.",
        f"On {rng.choice(w.DAYS)}, {name} bought {rng.randint(2, 40)} {w.plural(thing)} in {rng.choice(w.CITIES)}.",
        f"{name} works as {w.a(rng.choice(w.JOBS))} and likes {rng.choice(w.HOBBIES)}.",
        f"My code is {rng.randint(100, 9999)} and my name is {name}.",
        f"{name} eats {rng.choice(w.FOODS)} with {other} in the {rng.choice(w.PLACES)}.",
        f"There is {w.a(rng.choice(w.ADJECTIVES))} {thing} in the {rng.choice(w.PLACES)}.",
        " ".join(rng.sample(w.OBJECTS + w.ANIMALS + w.COLOURS, rng.randint(3, 9))),
    ])  # fmt: skip


def repeat(rng: Random) -> tuple[str, str]:
    """Repeat a text."""
    roll = rng.random()
    if roll < 0.6:
        text = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    elif roll < 0.7:
        text = "\n".join(tasks(rng, rng.randint(2, 6)))
    elif roll < 0.8:
        text = " ".join(rng.choices(w.OBJECTS + w.FOODS + w.COLOURS + w.HOBBIES, k=rng.choice((1, 1, 2, 3, 4))))
    else:
        text = " ".join(w.made_up(rng) for _ in range(rng.randint(2, 8)))
    ask = rng.choice(["Repeat the following text: {}", "Repeat the following text:\n{}", "Repeat: {}",
                      "Repeat this: {}", "Repeat: {}", "Say: {}", "Say this: {}", "Echo: {}", "Copy: {}", "Repeat {}",
                      "Say exactly this: {}", "Copy this text:\n{}", "Repeat after me: {}",
                      "Please repeat the following text: {}"])  # fmt: skip
    return ask.format(text), text


def record(rng: Random) -> tuple[str, str]:
    """A JSON object, made from a description."""
    name, city = w.person(rng), rng.choice(w.CITIES)
    age, job = rng.randint(5, 90), rng.choice(w.JOBS)
    full = {"name": name, "age": age, "city": city, "job": job}
    keys = rng.sample(list(full), rng.randint(2, 4))
    keys.sort(key=list(full).index)
    if "name" not in keys:
        keys.insert(0, "name")
    chosen = {key: full[key] for key in keys}
    style = rng.randrange(3)
    said = {"name": f"name {name}", "age": f"age {age}", "city": f"city {city}", "job": f"job {job}"}
    if style == 0:
        ask = rng.choice(["Write a JSON object with {}.", "Make a JSON object with {}.", "Give me JSON with {}."])
        ask = ask.format(w.join([said[key] for key in keys]))
    elif style == 1:
        facts = {"age": f"is {age} years old", "city": f"lives in {city}", "job": f"works as {w.a(job)}"}
        text = f"{name} " + w.join([facts[key] for key in keys if key != "name"]) + "."
        ask = rng.choice(["Turn this into JSON: {}", "Write this as JSON: {}", "Extract the data as JSON: {}"]).format(
            text
        )
    else:
        ask = rng.choice(["Write a JSON object for a person.", "Give me an example of a JSON object.",
                          "Write some JSON."])  # fmt: skip
    indent = 2 if rng.random() < 0.5 else None
    return ask, f"```json\n{json.dumps(chosen, indent=indent)}\n```"


def extract(rng: Random) -> tuple[str, str]:
    """Extract names, or other things, from a text as JSON."""
    names = w.people(rng, rng.randint(2, 5))
    kind = rng.choice(["names", "names", "names", "cities", "objects"])
    pool = {"names": names, "cities": rng.sample(w.CITIES, len(names)), "objects": rng.sample(w.OBJECTS, len(names))}
    found = pool[kind]
    pieces = []
    for i, name in enumerate(names):
        pieces.append({
            "names": f"{name} bought {w.a(rng.choice(w.OBJECTS))} in the {rng.choice(w.PLACES)}.",
            "cities": f"{name} travelled to {found[i]} in {rng.choice(w.MONTHS)}.",
            "objects": f"{name} found {w.a(found[i])} near the {rng.choice(w.PLACES)}.",
        }[kind])  # fmt: skip
    if kind == "names" and rng.random() < 0.4:
        pieces = [w.join(names) + rng.choice([" met in the park.", " went to the market.", " are friends."])]
    ask = rng.choice(
        ["Extract the {} as JSON: {}", "Extract the {} as JSON from this text:\n{}", "List the {} as JSON: {}"]
    )
    return ask.format(kind, " ".join(pieces)), json.dumps({kind: found})


def lookup(rng: Random) -> tuple[str, str]:
    """Answer a question about a short text."""
    names = w.people(rng, rng.randint(2, 4))
    kind = rng.randrange(3)
    values = [rng.sample(w.CITIES, 4), rng.sample(w.JOBS, 4), rng.sample(w.HOBBIES, 4)][kind]
    say = ["{} lives in {}.", "{} works as a {}.", "{} likes {}."][kind]
    asks = ["Where does {} live?", "What does {} do?", "What does {} like?"][kind]
    text = " ".join(say.format(n, v).replace(" a e", " an e") for n, v in zip(names, values, strict=False))
    i = rng.randrange(len(names))
    return f"{text} {asks.format(names[i])}", say.format(names[i], values[i]).replace(" a e", " an e")


def transform(rng: Random) -> tuple[str, str]:
    """Upper case, lower case, reversed order, sorting and counting of words."""
    words = rng.sample(w.OBJECTS + w.ANIMALS, rng.randint(3, 6))
    text = " ".join(words)
    kind = rng.randrange(5)
    if kind == 0:
        return f"Sort these words: {text}", " ".join(sorted(words))
    if kind == 1:
        return f"Reverse the order of these words: {text}", " ".join(reversed(words))
    if kind == 2:
        return f"Write these words as a list: {text}", "\n".join("- " + word for word in words)
    if kind == 3:
        return f"What is the first word of: {text}", words[0]
    return f"How many words are these? {text}", f"There are {w.NUMBER_WORDS[len(words)]} words."


def echo(rng: Random) -> str:
    """A random line, several times over: the purest exercise in copying from the context."""
    pool = w.OBJECTS + w.ANIMALS + w.NAMES + w.COLOURS + w.CITIES + w.FOODS + w.VARIABLES + w.ADJECTIVES
    parts = [rng.choice(pool) if rng.random() < 0.75 else str(rng.randint(0, 99)) for _ in range(rng.randint(2, 14))]
    parts = [w.made_up(rng) if rng.random() < 0.1 else part for part in parts]
    line = rng.choice((" ", " ", ", ", "-", "+")).join(parts)
    return rng.choice(("\n", " ", ". ", "; ")).join([line] * rng.randint(2, 4))


def source_file(rng: Random) -> str:
    """A plain Python file of several functions, for raw completion."""
    return "\n\n\n".join(function(rng)[2] for _ in range(rng.randint(2, 5)))
