"""Small sums as questions, worksheets and word problems. Some operand pairs are held out of training."""

from __future__ import annotations

from random import Random

from . import words as w

Sum = tuple[int, str, int, int]

_SIGNS = {"+": ["+", "+", " + ", " plus "], "-": ["-", " - ", " minus "], "*": ["*", " * ", " times ", "x", " x "]}
_ASK = [
    "What is {e}?", "What is {e}?", "What is {e}? Answer in one sentence.", "How much is {e}?", "Calculate {e}.",
    "Compute {e}.", "What does {e} equal?", "Please calculate {e}.", "Can you tell me what {e} is?", "{e}?", "{e} = ?",
    "Tell me the result of {e}.", "what is {e}", "What is {e} equal to?", "Solve {e}.", "Do you know what {e} is?",
    "Quick question: what is {e}?", "What's {e}?", "Work out {e}.",
]  # fmt: skip


def held_out(left: int, sign: str, right: int) -> bool:
    """Whether this sum never occurs in training (its mirror image does, where there is one)."""
    if (left, right) == (2, 2) or min(left, right) <= 1:
        return False
    return (left * 31 + right * 17 + ord(sign)) % 13 == 0 and (sign == "-" or left > right)


def draw(rng: Random, evaluation: bool = False) -> Sum:
    """One sum with its result: operands up to 20, of products up to 10. With `evaluation`, a held-out one."""
    while True:
        sign = rng.choice("++-*")
        high = rng.choice((9, 10)) if sign == "*" else rng.choice((9, 9, 20))
        left, right = rng.randint(0, high), rng.randint(0, high)
        if sign == "-" and left < right:
            left, right = right, left
        if held_out(left, sign, right) == evaluation:
            return left, sign, right, {"+": left + right, "-": left - right, "*": left * right}[sign]


def question(rng: Random, evaluation: bool = False) -> tuple[str, str]:
    """A question and its one-sentence answer, which repeats the expression as asked."""
    if not evaluation and rng.random() < 0.06:
        ask = rng.choice(["What is {e}? Answer in one sentence.", "What is {e}?", "How much is {e}?"])
        return ask.format(e="2+2"), "2+2 equals 4."
    left, sign, right, result = draw(rng, evaluation)
    expression = f"{left}{rng.choice(_SIGNS[sign])}{right}"
    prompt = rng.choice(_ASK).format(e=expression)
    return w.casual(rng, prompt) if not evaluation else prompt, f"{expression} equals {result}."


def follow_up(rng: Random) -> tuple[str, str]:
    """A second sum that leans on the first question."""
    left, sign, right, result = draw(rng)
    expression = f"{left}{rng.choice(_SIGNS[sign])}{right}"
    ask = rng.choice(["And {e}?", "And what is {e}?", "What about {e}?", "Now {e}.", "And how much is {e}?"])
    return ask.format(e=expression), f"{expression} equals {result}."


def in_words(rng: Random) -> tuple[str, str]:
    """A sum written out: `two plus two`."""
    while True:
        left, sign, right, result = draw(rng)
        if max(left, right, result) <= 20:
            break
    name = {"+": "plus", "-": "minus", "*": "times"}[sign]
    expression = f"{w.NUMBER_WORDS[left]} {name} {w.NUMBER_WORDS[right]}"
    ask = rng.choice(["What is {e}?", "How much is {e}?", "What is {e}? Answer in one sentence.", "Calculate {e}."])
    return ask.format(e=expression), f"{w.capital(expression)} equals {w.NUMBER_WORDS[result]}."


def bare_question(rng: Random) -> tuple[str, str]:
    """A question that asks for the number only."""
    left, sign, right, result = draw(rng)
    expression = f"{left}{rng.choice(_SIGNS[sign])}{right}"
    ask = rng.choice(["What is {e}? Answer with a number only.", "{e}= Give only the number.",
                      "Answer with just the number: {e}"])  # fmt: skip
    return ask.format(e=expression), str(result)


def word_problem(rng: Random) -> tuple[str, str]:
    """A one-step word problem."""
    name = w.person(rng)
    thing = w.plural(rng.choice(w.OBJECTS))
    while True:
        have = rng.randint(3, 20)
        more, less = rng.randint(2, 10), rng.randint(2, have - 1)
        if not held_out(have, "+", more) and not held_out(have, "-", less):
            break
    if rng.random() < 0.5:
        ask = f"{name} has {have} {thing} and gets {more} more. How many {thing} does {name} have now?"
        return ask, f"{have}+{more} equals {have + more}, so {name} has {have + more} {thing}."
    ask = f"{name} has {have} {thing} and gives {less} away. How many {thing} are left?"
    return ask, f"{have}-{less} equals {have - less}, so {have - less} {thing} are left."


def compare(rng: Random) -> tuple[str, str]:
    """Which of two numbers is larger, even or odd, the next number."""
    left, right = rng.sample(range(100), 2)
    kind = rng.randrange(4)
    if kind == 0:
        return f"Which is larger, {left} or {right}?", f"{max(left, right)} is larger than {min(left, right)}."
    if kind == 1:
        return f"Which is smaller, {left} or {right}?", f"{min(left, right)} is smaller than {max(left, right)}."
    if kind == 2:
        return f"Is {left} even or odd?", f"{left} is {'odd' if left % 2 else 'even'}."
    return f"What comes after {left}?", f"After {left} comes {left + 1}."


def worksheet(rng: Random) -> str:
    """Many sums, one per line."""
    template = rng.choice(["{l}{s}{r}={v}", "{l} {s} {r} = {v}", "{l}{s}{r} equals {v}."])
    lines = []
    for _ in range(rng.randint(6, 16)):
        left, sign, right, result = draw(rng)
        lines.append(template.format(l=left, s=sign, r=right, v=result))
    return "\n".join(lines)


def table(rng: Random) -> tuple[str, str]:
    """A multiplication table."""
    n = rng.randint(1, 12)
    rows = [f"{n} x {i} = {n * i}" for i in range(1, 11) if not held_out(n, "*", i)]
    return f"Write the multiplication table of {n}.", "\n".join(rows)
