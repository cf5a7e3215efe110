"""What grammars cost and gain: masks per step, and tokens/s under a schema with and without drafts.

What to expect. A mask is a walk over the vocabulary's trie, from a state that llguidance mostly knows already: some
microseconds a row, while the device computes for milliseconds. Applying it costs one pass over the logits. So a schema
without drafts should be as fast as free text. With drafts, what the schema forces (names of properties, punctuation)
comes in one forward: the gain depends on how much of an answer that is.

The same requests run in turn: free text and the schema without drafts (`max_drafts` 0), the schema with them. Speeds
are output tokens/s after the first token, of one stream; ratios are taken within a round. The tokens of both answers
under the schema must be equal. The last line is one JSON object.

    python benchmarks/grammars.py "$(phalanx pull smollm2)"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from phalanx.config import EngineConfig
from phalanx.spec.running_grammars import Grammars
from phalanx.speculation_config import Control, SuffixSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.grammar import GrammarCompiler
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Batch, Finished, ModelInfo, Sampling, SequenceRequest, StopRule, Submit, Tokens

TEXT = {"type": "string", "maxLength": 40}
ADDRESS = {
    "type": "object",
    "properties": {"street": TEXT, "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"}, "country": TEXT},
    "required": ["street", "postal_code", "country"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": TEXT,
        "last_name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["teacher", "engineer", "nurse", "student", "other"]},
        "address": ADDRESS,
        "hobbies": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4},
        "is_married": {"type": "boolean"},
        "email_address": TEXT,
    },
    "required": ["first_name", "last_name", "age", "occupation", "address", "hobbies", "is_married", "email_address"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
WRITTEN = json.dumps(
    {
        "first_name": "John", "last_name": "Smith", "age": 42, "occupation": "teacher",
        "address": {"street": "12 Main Street", "postal_code": "12345", "country": "United Kingdom"},
        "hobbies": ["reading books", "long walks"], "is_married": True, "email_address": "john@example.com",
    },
    separators=(",", ":"),
)  # fmt: skip
QUESTIONS = ["a teacher in London", "a nurse who likes music", "an engineer from Spain", "a student of history"]
DRAFTS = 8


def masks(tokenizer: Tokenizer, streams: int, *, drafts: int) -> dict[str, float]:
    """Microseconds per step for the masks of all streams, which are at different places of the same answer."""
    grammars = Grammars(lambda: GrammarCompiler(tokenizer, tokenizer.eos_ids), lambda: None)
    tokens = tokenizer.encode(WRITTEN, add_special_tokens=False)
    for number in range(streams):
        stop = StopRule(max_tokens=1)
        begun = tokens[: number * 2]
        grammars.begin(number, SequenceRequest(id="", group="", prompt=[1], sampling=Sampling(), stop=stop,
                                               grammar=GRAMMAR, committed=begun))  # fmt: skip
    while grammars.held:
        time.sleep(0.01)
        assert not grammars.take_made()
    took = []
    for step in range(len(tokens) - 2 * streams - drafts):
        places = {number: step + 2 * number for number in range(streams)}
        fed = {number: tokens[at : at + drafts] for number, at in places.items()}
        before = time.perf_counter()
        grammars.masks(fed)
        took.append((time.perf_counter() - before) * 1e6)
        for number, at in places.items():
            grammars.advance(number, tokens[at : at + 1])
    return {"median_us": round(statistics.median(took), 1), "p99_us": round(statistics.quantiles(took, n=100)[98], 1)}


class Client:
    """Runs one sequence after another on an engine."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.ready = asyncio.Event()
        self._done: asyncio.Future[Finished] | None = None
        self._tokens: list[int] = []
        engine.subscribe(self)

    def on_ready(self, info: ModelInfo) -> None:
        self.ready.set()

    def on_down(self, reason: str, will_restart: bool) -> None:
        raise RuntimeError(reason)

    def on_batch(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, Tokens):
                self._tokens += event.tokens
            elif isinstance(event, Finished) and self._done is not None:
                self._done.set_result(event)

    async def ask(self, request: SequenceRequest) -> tuple[list[int], Finished]:
        """The tokens of an answer and how it ended."""
        self._tokens, self._done = [], asyncio.get_running_loop().create_future()
        self._engine.send(Submit(request))
        finished = await self._done
        return self._tokens, finished


def speed(finished: Finished) -> float:
    """Output tokens/s after the first."""
    return (finished.n_tokens - 1) / finished.timing.decode_s


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


async def speeds(model: Path, tokenizer: Tokenizer, rounds: int, control: Control) -> dict[str, Any]:
    """Ratios of the three kinds of requests, and how many tokens each forward gave under the schema."""
    speculation = SuffixSpeculation(suffix_decoding_max_cached_requests=0, control=control)
    config = EngineConfig(model=str(model), speculative_config=speculation)
    engine = EngineProcess(config)
    client = Client(engine)
    await engine.start()
    await client.ready.wait()
    costs, gains, plain, accepted = [], [], [], []
    try:
        for n in range(rounds + 1):
            prompt = tokenizer.encode_chat(
                [{"role": "user", "content": f"Describe {QUESTIONS[n % len(QUESTIONS)]} as JSON."}], template_kwargs={}
            )

            def request(kind: str, grammar: str, drafts: int | None, prompt: list[int] = prompt) -> SequenceRequest:
                ends = tokenizer.eos_ids if grammar else frozenset[int]()
                return SequenceRequest(
                    id=kind, group=kind, prompt=prompt, sampling=Sampling(temperature=0.0), grammar=grammar,
                    stop=StopRule(max_tokens=160, stop_ids=ends), max_drafts=drafts,
                )  # fmt: skip

            _, free = await client.ask(request("free", "", 0))
            tokens, without = await client.ask(request("without", GRAMMAR, 0))
            drafted, with_drafts = await client.ask(request("with", GRAMMAR, None))
            assert tokens == drafted, "drafts changed tokens"
            if n:  # the first round measures what steps cost
                costs.append(speed(without) / speed(free))
                gains.append(speed(with_drafts) / speed(without))
                plain.append(speed(free))
                accepted.append(with_drafts.accepted_tokens / with_drafts.n_tokens)
    finally:
        await engine.close()
    return {
        "free_text_tokens_per_s": round(statistics.median(plain), 1),
        "schema_over_free_text": spread(costs),
        "drafts_over_none": spread(gains),
        "accepted_share": round(statistics.median(accepted), 3),
        "rounds": rounds,
        "control": control,
    }


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--control", choices=("cost", "always"), default="cost", help="see `phalanx serve --help`")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    figures: dict[str, Any] = {"vocabulary": tokenizer.vocab_size}
    for streams in (1, 16):
        figures[f"masks_{streams}"] = masks(tokenizer, streams, drafts=0)
        figures[f"masks_{streams}_drafts_{DRAFTS}"] = masks(tokenizer, streams, drafts=DRAFTS)
    figures |= asyncio.run(speeds(args.model, tokenizer, args.rounds, args.control))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
