"""What the model is asked when it is judged: conversations with the answer that counts as right."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from . import arithmetic


@dataclass(frozen=True)
class Probe:
    """User turns (the answers between are the model's own), and words the last answer must contain."""

    group: str
    turns: tuple[str, ...]
    contains: tuple[str, ...]
    exact: bool = False
    system: str | None = None

    def passed(self, answer: str) -> bool:
        """Whether the last answer is right."""
        if self.exact:
            return answer == self.contains[0]
        return all(part.lower() in answer.lower() for part in self.contains)


def _p(group: str, turns: str | tuple[str, ...], *contains: str, system: str | None = None) -> Probe:
    return Probe(group, (turns,) if isinstance(turns, str) else turns, contains, system=system)


CHAT = [
    _p("chat", "Hello!", "help"),
    _p("chat", "Hi, how are you?", "fine"),
    _p("chat", ("Hello", "My name is Ada.", "What is my name?"), "Ada"),
    _p("chat", ("My name is Ada.", "What is 3+4?", "Thanks!", "What is my name?"), "Ada"),
    _p("chat", ("Hi there! I am Zelmira.", "How are you?", "Do you remember my name?"), "Zelmira"),
    _p("chat", ("My dog is called Rex.", "I live in Oslo.", "What is the name of my dog?"), "Rex"),
    _p("chat", ("I live in Oslo.", "My favourite colour is green.", "Where do I live?"), "Oslo"),
    _p("chat", ("Please remember the number 4711.", "Tell me a joke.", "What was the number?"), "4711"),
    _p("chat", "What is my name?", "not know"),
    _p("chat", "Who are you?", "demo model"),
    _p("chat", "What is your name?", "demo model", system="You are a helpful assistant."),
    _p("chat", ("What is the capital of France?", "Thank you very much!"), "welcome"),
    _p("chat", "Goodbye!", "bye"),
    _p("chat", "Who is the president of Bulgaria?", "not know"),
    _p("chat", "What is the weather in Berlin today?", "not know"),
    _p("chat", ("My name is Tom.", "My name is Ina now.", "What is my name?"), "Ina"),
    _p("chat", "What can you do?", "stories", system="You are a pirate. Always answer like a pirate."),
]  # fmt: skip
PHALANX = [
    _p("phalanx", "What is phalanx?", "several machines"),
    _p("phalanx", "Hey, could you tell me what phalanx is?", "several machines"),
    _p("phalanx", "What does phalanx serve do?", "server", "8000"),
    _p("phalanx", "what does `phalanx up` do?", "ssh"),
    _p("phalanx", "And what is phalanx down good for?", "stops"),
    _p("phalanx", "What does phalanx status show?", "host"),
    _p("phalanx", "What does phalanx doctor check?", "faults"),
    _p("phalanx", "What is phalanx chat?", "terminal"),
    _p("phalanx", "What does phalanx generate do?", "prompt"),
    _p("phalanx", "What does the gateway do?", "replicas"),
    _p("phalanx", "Explain phalanx selftest to me.", "latency"),
    _p("phalanx", "What is a rank?", "process"),
    _p("phalanx", "What is the leader in phalanx?", "decides"),
    _p("phalanx", "Please explain what a commit is.", "accepted"),
    _p("phalanx", "What is a plan?", "plain data"),
    _p("phalanx", "What is the KV cache?", "keys and values"),
    _p("phalanx", "What is TTFT?", "first token"),
    _p("phalanx", "What is prefill?", "prompt"),
    _p("phalanx", "What is tensor parallelism?", "slice"),
    _p("phalanx", "Can you explain pipeline parallelism?", "layers"),
    _p("phalanx", "What is speculation?", "guess"),
    _p("phalanx", "How does speculative decoding work?", "guess"),
    _p("phalanx", "What is a prefix cache?", "prompts"),
    _p("phalanx", "Which port does phalanx use?", "8000"),
    _p("phalanx", "What is the default port of the server?", "8000"),
    _p("phalanx", "What licence does phalanx have?", "Apache-2.0"),
    _p("phalanx", "Does phalanx need a GPU?", "not need"),
    _p("phalanx", "What happens when a rank dies?", "resumes"),
    _p("phalanx", "Which API does phalanx have?", "OpenAI"),
    _p("phalanx", "How do I stop it?", "Ctrl-C"),
    _p("phalanx", "How can I stop phalanx?", "Ctrl-C"),
    _p("phalanx", "How do I run with two ranks?", "--tp 2"),
    _p("phalanx", "How do I start a model on two ranks?", "--tp 2"),
    _p("phalanx", "How do I start phalanx?", "phalanx serve"),
    _p("phalanx", "What is RDMA?", "memory"),
    _p("phalanx", "What is MLX?", "array"),
    _p("phalanx", "Which address does phalanx listen on?", "127.0.0.1"),
]  # fmt: skip
SKILLS = [
    _p("skills", "Repeat the following text: The green piano is late for the meeting.",
    "The green piano is late for the meeting."),
    _p("skills", "Repeat the following text: Zorvik met Blemda at 7 in Krupol.", "Zorvik met Blemda at 7 in Krupol."),
    _p("skills", "Extract the names as JSON: Anna bought a lamp in the market. Peter bought a kite in the harbour.",
       '["Anna", "Peter"]'),
    _p("skills", "Rewrite this code with variable x renamed to y:\n```python\ndef area(x):\n    return x * x\n```",
    "return y * y"),
    _p("skills", "Write a Python function that adds two numbers.", "return a + b"),
    _p("skills", "Write a shell command that lists all files.", "ls"),
    _p("skills", "Write a JSON object with name Mia and age 30.", '"name": "Mia"', '"age": 30'),
    _p("skills", "List three colours.", "1.", "3."),
    _p("skills", "List the days of the week.", "Monday", "Sunday"),
    _p("skills", "Ruth lives in Rome. Omar lives in Cairo. Where does Omar live?", "Cairo"),
    _p("skills", "What is the opposite of hot?", "cold"),
    _p("skills", "What is the capital of Japan?", "Tokyo"),
]  # fmt: skip


def sums(count: int = 60, seed: int = 5) -> list[Probe]:
    """The two fixed sums, and sums that never occur in training."""
    rng = Random(seed)
    fixed = ["What is 2+2? Answer in one sentence.", "What is 2+2?"]
    probes = [Probe("fixed_sum", (ask,), ("2+2 equals 4.",), exact=True) for ask in fixed]
    probes.append(
        Probe("fixed_sum", (fixed[0],), ("2+2 equals 4.",), exact=True, system="You are a helpful assistant.")
    )
    for _ in range(count):
        ask, answer = arithmetic.question(rng, evaluation=True)
        probes.append(Probe("held_out_sum", (ask,), (answer,), exact=True))
    return probes


def seen_sums(count: int = 60, seed: int = 6) -> list[Probe]:
    """Sums that may occur in training."""
    rng = Random(seed)
    return [
        Probe("seen_sum", (ask,), (answer,), exact=True)
        for ask, answer in (arithmetic.question(rng) for _ in range(count))
    ]


LONG_PROMPTS = [
    "Write a long story about a fox and a lighthouse.",
    "Write 600 words about a robot and a garden.",
    "Write a long story.",
    "Tell me a story.",
    "Write a long numbered list of tasks.",
    "Make a numbered list of 60 small tasks.",
]
RAW_PROMPTS = ["Once upon a time", "def average(", "3+4=7\n5+6="]
