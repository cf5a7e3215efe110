"""An engine in this process, with any drafter: the real leader, scheduler, runner and model, without sockets.

Also an oracle drafter with a rate of errors, and requests that end in every way: by a stop id, by a stop string that
the server finds, by length, and by cancellation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model
from support.drafts import by_position
from tokenizers import Tokenizer

from phalanx.demo import MODEL_DIR
from phalanx.dist.stage_link import StageConnections
from phalanx.engine.leader import Leader
from phalanx.engine.link import SingleRank
from phalanx.engine.stages import StagedRunner
from phalanx.engine.step_deadline import StepDeadline
from phalanx.errors import ModelUnsupported
from phalanx.model import registry
from phalanx.model.runner import Runner
from phalanx.sched.admission import KvLimits
from phalanx.sched.prefill_budget import PrefillBounds
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.spec.control import Control
from phalanx.spec.drafters import Draft, Drafter
from phalanx.spec.rules import Always
from phalanx.spec.running_grammars import Grammars
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import SpecMeter
from phalanx.text.grammar import GrammarCompiler
from phalanx.types import (
    Batch,
    Cancel,
    Finish,
    Finished,
    Sampling,
    SequenceRequest,
    SpecStats,
    StopRule,
    Submit,
    TokenLogprobs,
    Tokens,
)

TIE = 1e-4
"""Log-probabilities this close count as equal: a forward over several tokens sums in another order."""


@dataclass
class Answer:
    """The events of a sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class Post:
    """A server socket without a server: records the messages that the leader sends."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}

    def drain(self, *, block: bool) -> list[Any]:
        return []

    def wake(self) -> None:
        pass

    def send(self, message: Any) -> None:
        if not isinstance(message, Batch):
            return
        for event in message.events:
            answer = self.answers.setdefault(event.id, Answer())
            if isinstance(event, Tokens):
                assert event.start == len(answer.tokens)
                answer.tokens += event.tokens
                answer.logprobs += event.logprobs or []
                assert not answer.logprobs or len(answer.logprobs) == len(answer.tokens)
            elif isinstance(event, Finished):
                assert answer.finished is None
                answer.finished = event


class Engine:
    """A leader and a model. Engines may share a model if only one of them runs at a time.

    Args:
        decode_share: above 0, when a prompt is read depends on how long steps take.
        link: to other ranks; none if None.
    """

    def __init__(
        self,
        runner: Runner,
        vocab: int,
        *,
        rows: int = 16,
        budget: int = 1 << 28,
        batched: int = 160,
        decode_share: float = 0.0,
        post: Post | None = None,
        compiler: GrammarCompiler | None = None,
        link: Any = None,
        plans_ahead: int = 0,
    ) -> None:
        limits = KvLimits(
            max_num_seqs=rows, max_model_len=1024, kv_budget=budget, bytes_per_token=runner.facts.bytes_per_token
        )
        config = SchedulerConfig(
            limits=limits,
            prefill=PrefillBounds(max_tokens=batched),
            target_step_s=0.1,
            decode_share=decode_share,
            prefix_budget=1 << 24,
            recurrent=runner.facts.recurrent,
        )
        self.scheduler = Scheduler(config)
        self.metadata = SamplingMetadataCache()
        self.post = post or Post()
        self.vocab = vocab
        self.meter = SpecMeter("test")
        self.grammars = Grammars(lambda: compiler or _no_tokenizer(), self.post.wake)
        self._runner = runner
        self._link = link or SingleRank()
        self._plans_ahead = plans_ahead
        self.leader = self._lead(None)

    def speculate(self, drafter: Drafter, k: int, control: Control | None = None) -> Engine:
        """Speculate from now on with this drafter. Returns self."""
        speculator = Speculator(drafter, control or Always(k), self.meter, self.vocab, _grammars=self.grammars)
        self.leader = self._lead(speculator)
        return self

    def place(self, number: int, drafts: Sequence[int]) -> Any:
        """Where a draft model draws."""
        return self.metadata.after(self.scheduler.by_number[number], drafts)

    def _lead(self, speculator: Speculator | None) -> Leader:
        alone = StagedRunner(self._runner, 0, StageConnections(None, ()), "float32")
        return Leader(
            self.scheduler, alone, self.post, link=self._link, deadline=StepDeadline(1e6),
            metadata=self.metadata, speculator=speculator, grammars=self.grammars, plans_ahead=self._plans_ahead,
        )  # fmt: skip

    def step(self) -> None:
        self.leader.step()

    def take(self, message: Any) -> None:
        self.leader.handle(message)

    @property
    def stats(self) -> SpecStats:
        return self.meter.stats()

    def run(self, jobs: Sequence[Job], *, at_once: int = 4) -> dict[str, Answer]:
        """Run all jobs, `at_once` at a time. Returns the clients' answers, clipped as the server would."""
        waiting = list(jobs)
        ends = {job.request.id: job for job in jobs if job.leaves_after or job.string_after}
        while waiting or not self.scheduler.idle:
            for job in waiting[:at_once]:
                self.take(Submit(job.request))
            del waiting[:at_once]
            for _ in range(3):
                self.step()
                for number in [n for n in ends if len(self._tokens(n)) >= ends[n].enough]:
                    job = ends.pop(number)
                    self.take(Cancel(number) if job.leaves_after else Finish(number, job.string_after))
        for job in jobs:
            answer = self.post.answers[job.request.id]
            assert answer.finished is not None
            del answer.tokens[answer.finished.n_tokens if not job.leaves_after else job.leaves_after :]
            del answer.logprobs[len(answer.tokens) :]
        return self.post.answers

    def _tokens(self, number: str) -> list[int]:
        answer = self.post.answers.get(number)
        return [] if answer is None else answer.tokens


def _no_tokenizer() -> GrammarCompiler:
    raise ModelUnsupported("this engine has no tokenizer")


@dataclass(frozen=True)
class Job:
    """A request. The client cancels it, or the server finds a stop string, after so many tokens; 0 for never."""

    request: SequenceRequest
    leaves_after: int = 0
    string_after: int = 0

    @property
    def enough(self) -> int:
        return self.leaves_after or self.string_after


def make_jobs(prompts: Sequence[list[int]], *, longest: int, greedy: bool = True, seed: int = 5) -> list[Job]:
    """One job per prompt. The first generates `longest` tokens; the others end in all other ways."""
    rnd = random.Random(seed)
    jobs = []
    for i, prompt in enumerate(prompts):
        stops = frozenset(rnd.randrange(3, 200) for _ in range(3)) if i % 4 == 1 else frozenset()
        sampling = Sampling(temperature=0.0, logprobs=2) if greedy else SAMPLINGS[i % len(SAMPLINGS)]
        least = 6 if i % 8 == 1 else 0
        stop = StopRule(max_tokens=longest if i == 0 else 24 + 7 * i, stop_ids=stops, min_tokens=least)
        request = SequenceRequest(id=str(i), group=str(i), prompt=prompt, sampling=sampling, stop=stop)
        jobs.append(Job(request, leaves_after=17 if i % 8 == 2 else 0, string_after=21 if i % 8 == 6 else 0))
    return jobs


SAMPLINGS = [
    Sampling(seed=1, temperature=1.0, logprobs=2),
    Sampling(seed=2, temperature=0.7, top_p=0.9, logprobs=0),
    Sampling(seed=3, temperature=1.0, top_k=20, presence_penalty=0.5, frequency_penalty=0.2),
    Sampling(seed=4, temperature=0.7, min_p=0.05, repetition_penalty=1.1),
    Sampling(seed=5, temperature=0.0, repetition_penalty=1.2, logit_bias={7: 2.0, 9: -100.0}, logprobs=3),
]
"""Every parameter by which a token depends on more than its logits."""


class Oracle(Drafter):
    """Drafts the known answers, with a rate of random errors."""

    def __init__(self, answers: Sequence[Sequence[int]], errors: float = 0.0, vocab: int = 512) -> None:
        self._answers = answers
        self._errors = errors
        self._vocab = vocab
        self._rnd = random.Random(11)
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        answer = next((a for a in self._answers if list(a[: len(tokens)]) == list(tokens)), ())
        self._known[key] = (answer, len(tokens))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        answer, n = self._known[key]
        self._known[key] = (answer, n + len(tokens))

    def end(self, key: int) -> None:
        del self._known[key]

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        drafts = {}
        for key, k in wanted.items():
            answer, n = self._known[key]
            if n < len(answer):
                drafts[key] = by_position([self._with_errors(token) for token in answer[n : n + k]])
        return drafts

    def _with_errors(self, token: int) -> int:
        return self._rnd.randrange(self._vocab) if self._rnd.random() < self._errors else token


def load(path: Path, runner_class: type[Runner] = Runner) -> tuple[Runner, int]:
    """A model's runner, checked as at a start, and the size of its vocabulary."""
    model, config = load_model(path)
    model.set_dtype(mx.float32)
    runner = runner_class(model, registry.inspect(model, config), mx.float32)
    if runner_class is Runner:
        registry.check_model(runner, model)
    return runner, config["vocab_size"]


def with_noise(path: Path, target: Path, noise: float) -> Path:
    """A copy of a model with noise on its weights, as a draft model that is sometimes right."""
    target.mkdir()
    for file in path.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    mx.random.seed(3)
    weights = {
        name: w + noise * mx.std(w) * mx.random.normal(w.shape) if mx.issubdtype(w.dtype, mx.floating) else w
        for name, w in mx.load(str(path / "model.safetensors")).items()
    }
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    return target


def differences(got: Mapping[str, Answer], wanted: Mapping[str, Answer]) -> list[str]:
    """The answers that differ where the two likeliest tokens were not a near tie, in words."""
    found = []
    for number, answer in wanted.items():
        mine = got[number].tokens
        if mine == answer.tokens:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, answer.tokens, strict=False)) if a != b),
            min(len(mine), len(answer.tokens)),
        )
        top = answer.logprobs[at].top if at < len(answer.logprobs) else []
        gap = top[0][1] - top[1][1] if len(top) > 1 else 1.0
        if gap > TIE:
            found.append(f"{number}: token {at} of {len(answer.tokens)} (gap {gap:.2g}): {mine[at : at + 3]}")
    return found


def random_prompts(count: int, vocab: int, longest: int = 60) -> list[list[int]]:
    """Random prompts with repetitions, so that prompt lookup finds matches."""
    rnd = random.Random(count)
    prompts = []
    for i in range(count):
        part = [rnd.randrange(3, vocab) for _ in range(1 + i * 17 % longest)]
        prompts.append(part + part[: len(part) // 2])
    return prompts


TOPICS = (
    "fox lighthouse robot garden baker ship clock teacher river dragon painter bridge cat market train moon".split()
)


def demo_prompts(count: int) -> list[list[int]]:
    """Prompts that the demo model was trained for."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    asked = "<|user|>Write a {} story about a {}.<|end|><|assistant|>"
    texts = [asked.format(("long", "short")[i % 2], topic) for i, topic in enumerate(TOPICS[:count])]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
