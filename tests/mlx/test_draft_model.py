"""A draft model on its own: what it says is its own greedy continuation, whatever was accepted or skipped before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.drafts import drafted
from support.mlx_lm_greedy import stock_greedy
from support.models import make_model
from support.speculation import load, random_prompts

from phalanx.config import EngineConfig
from phalanx.engine.link import SingleRank
from phalanx.engine.memory_plan import predict
from phalanx.engine.speculation import DraftWeights, describe
from phalanx.errors import ConfigError, ModelNotFound
from phalanx.model import registry
from phalanx.model.loading.load import prepare
from phalanx.model.sampling.metadata import SamplingMetadata, TokenCounts
from phalanx.sched.plan import Resize
from phalanx.spec.draft_model import MAX_CATCH_UP, DraftModel
from phalanx.spec.drafters import BUCKETS
from phalanx.speculation_config import DraftModelSpeculation
from phalanx.types import Sampling

VOCAB = 512


def greedy(key: int, drafts: Sequence[int]) -> SamplingMetadata:
    return SamplingMetadata(Sampling(temperature=0.0), len(drafts), TokenCounts([]), ahead=tuple(drafts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_model("llama", folder / "llama")


@pytest.fixture(scope="module")
def runner(llama: Path):
    return load(llama)[0]


def drafter_on(runner, kv_budget: int = 1 << 26) -> DraftModel:
    return DraftModel(runner, VOCAB, kv_budget, greedy)


def read_all(drafter: DraftModel, keys: Sequence[int]) -> None:
    drafter.read(drafter.unread(keys))


def test_drafts_are_the_models_own_continuation(runner):
    """Three rows of different lengths, drafts of different lengths, accepted in part, in whole and not at all."""
    prompts = random_prompts(3, VOCAB)
    wanted = stock_greedy(runner.model, prompts, 40)
    drafter = drafter_on(runner)
    said = [list(prompt) for prompt in prompts]
    for key, prompt in enumerate(prompts):
        drafter.begin(key, prompt)
    done = [0, 0, 0]
    read_all(drafter, range(3))
    for step, gains in enumerate([(1, 3, 5), (4, 1, 2), (6, 2, 1), (1, 5, 3), (2, 7, 7)]):
        drafts = drafted(drafter, {key: 1 + (key + step) % 6 for key in range(3)})
        for key, gain in enumerate(gains):
            assert drafts[key] == wanted[key][done[key] : done[key] + 1 + (key + step) % 6]
            gained = wanted[key][done[key] : done[key] + gain]
            drafter.extend(key, gained)
            said[key] += gained
            done[key] += gain
    for key in range(3):
        drafter.end(key)
    assert runner.kv_bytes == 0


def test_a_wrong_draft_is_cut_off(runner):
    (prompt,) = random_prompts(1, VOCAB)
    prompt = [*prompt, 9, 8, 7]
    drafter = drafter_on(runner)
    drafter.begin(0, prompt)
    read_all(drafter, [0])
    drafts = drafted(drafter, {0: 5})[0]
    other = [*drafts[:2], (drafts[2] + 1) % VOCAB]  # the target says something else in the third place
    drafter.extend(0, other)
    assert drafted(drafter, {0: 5})[0] == stock_greedy(runner.model, [[*prompt, *other]], 5)[0]


def test_rows_come_and_go_between_others(runner):
    """A row leaves from the middle, one was not asked for, one was asked for twice without a commit in between."""
    prompts = random_prompts(5, VOCAB)[1:]
    wanted = stock_greedy(runner.model, prompts, 20)
    drafter = drafter_on(runner)
    for key, prompt in enumerate(prompts):
        drafter.begin(key, prompt)
    read_all(drafter, range(4))
    drafted(drafter, dict.fromkeys(range(4), 3))
    drafter.end(1)
    assert drafted(drafter, {0: 4, 3: 4}) == {0: wanted[0][:4], 3: wanted[3][:4]}
    assert drafted(drafter, {0: 2, 2: 4}) == {0: wanted[0][:2], 2: wanted[2][:4]}
    drafter.extend(2, wanted[2][:9])
    assert drafted(drafter, {2: 4, 3: 1}) == {2: wanted[2][9:13], 3: wanted[3][:1]}


def test_a_long_prompt_is_read_in_chunks(runner):
    """As it is told, token by token; a row that was not read is not drafted for, the others are."""
    prompt = [(5 * i) % 500 + 3 for i in range(300)]
    short = [4, 5, 6]
    wanted = stock_greedy(runner.model, [prompt, short], 3)
    drafter = drafter_on(runner)
    drafter.begin(0, prompt)
    drafter.begin(1, short)
    fed = []
    for chunk, left in ((128, 171), (100, 71), (64, 0)):
        assert drafted(drafter, {0: 3, 1: 3}) == {1: wanted[1]}
        fed.append(drafter.read({0: chunk}))
        assert drafter.unread([0, 1]) == ({0: left} if left else {})
    assert fed == [128, 100, 64]
    assert drafted(drafter, {0: 3, 1: 3}) == {0: wanted[0], 1: wanted[1]}


def test_what_was_not_asked_for_is_read_again_from_where_it_was(runner):
    (prompt,) = random_prompts(1, VOCAB)
    said = stock_greedy(runner.model, [prompt], 40)[0]
    drafter = drafter_on(runner)
    drafter.begin(0, prompt)
    read_all(drafter, [0])
    drafted(drafter, {0: 4})
    drafter.extend(0, said[: MAX_CATCH_UP - 1])
    assert drafter.unread([0]) == {}
    drafter.extend(0, said[MAX_CATCH_UP - 1 : 30])
    assert drafter.unread([0]) == {0: 30 - 3 - 1}  # of four drafts three were fed
    read_all(drafter, [0])
    assert drafted(drafter, {0: 4})[0] == said[30:34]


@pytest.mark.parametrize("most", [1, 12, 100])
def test_logits_of_a_drafting_forward_are_bounded(runner, monkeypatch, most):
    """Rows with more known tokens than that are read first, where there are no logits."""
    prompts = [[3 + i, *range(10, 16)] for i in range(4)]
    wanted = stock_greedy(runner.model, prompts, 3)
    areas = []
    forward = type(runner).forward

    def spy(self, fwd, kv_len):
        areas.append(len(fwd.tokens) * len(fwd.tokens[0]) if fwd.sample else 0)
        return forward(self, fwd, kv_len)

    monkeypatch.setattr(type(runner), "forward", spy)
    drafter = DraftModel(runner, VOCAB, 1 << 26, greedy, most)
    for key, prompt in enumerate(prompts):
        drafter.begin(key, prompt)
    keys = dict.fromkeys(range(4), 3)
    for _ in range(3):
        read_all(drafter, range(4))
        drafts = drafted(drafter, keys)
    assert drafts == dict(enumerate(wanted))
    assert max(areas) <= max(4, most)
    for key in range(4):
        drafter.end(key)


def test_reserved_rows_cost_their_own_tokens_and_are_never_resized(runner, monkeypatch):
    """Rows of 250 and 20 tokens in a budget of 320, which holds one of two buffers that are as long as the longer."""
    resized = []
    apply = type(runner).apply

    def spy(self, ops):
        resized.extend(op for op in ops if isinstance(op, Resize) and op.rows)
        apply(self, ops)

    monkeypatch.setattr(type(runner), "apply", spy)
    prompts = [[(5 * i) % 500 + 3 for i in range(250)], list(range(10, 30)), [7] * 90]
    wanted = stock_greedy(runner.model, prompts[:2], 3)
    budget = 320 * runner.facts.bytes_per_token
    assert len(_drafts_of_all(DraftModel(runner, VOCAB, budget, greedy), prompts)) == 1
    resized.clear()
    reserved = DraftModel(runner, VOCAB, budget, greedy, 256, (4, 512))
    assert _drafts_of_all(reserved, prompts) == dict(enumerate(wanted)) and resized == [Resize(0, 4, 512)]


def _drafts_of_all(drafter: DraftModel, prompts: list[list[int]]) -> dict[int, list[int]]:
    for key, prompt in enumerate(prompts):
        drafter.begin(key, prompt)
        read_all(drafter, [key])
    drafts = drafted(drafter, dict.fromkeys(range(len(prompts)), 3))
    for key in range(len(prompts)):
        drafter.end(key)
    return drafts


def test_a_row_beyond_the_budget_or_the_context_is_not_drafted_for(runner):
    per_row = 256 * runner.facts.bytes_per_token
    drafter = drafter_on(runner, kv_budget=per_row)
    drafter.begin(0, [7] * 300)
    assert drafter.unread([0]) == {}
    drafter.begin(1, [7, 8])
    drafter.begin(2, [9, 8])
    assert drafted(drafter, {0: 2, 1: 2, 2: 2}).keys() == {1}
    drafter.end(1)
    assert drafted(drafter, {0: 2, 2: 2}).keys() == {2}
    drafter.begin(3, [7] * 100)
    assert drafter.unread([3]) == {}  # no memory now
    drafter.end(2)
    assert drafter.unread([3]) == {3: 99}
    limit = runner.facts.max_len
    far = drafter_on(runner)
    far.begin(0, [7] * (limit - 1))
    assert drafted(far, {0: 2}) == {}


@pytest.mark.parametrize("length", range(220, 262, 3))
def test_what_is_read_stays_for_the_longest_draft(runner, length):
    """At the end of its memory a row is not read again and again to give way to its own drafts."""
    drafter = drafter_on(runner, kv_budget=256 * runner.facts.bytes_per_token)
    drafter.begin(0, [7] * length)
    n_read = 0
    for _ in range(40):
        n_read += drafter.read(drafter.unread([0]))
        drafted(drafter, {0: BUCKETS})
        drafter.extend(0, [8])
    assert n_read <= length


# At start -----------------------------------------------------------------------------------------------------------


def speculating(draft: Path | str) -> tuple[EngineConfig, DraftModelSpeculation]:
    spec = DraftModelSpeculation(model=str(draft))
    return EngineConfig(model="target", speculative_config=spec), spec


def test_another_tokenizer_is_refused(llama, folder):
    other = make_model("llama", folder / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"], vocabulary["ac"] = vocabulary["ac"], vocabulary["ab"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"another tokenizer than target: token \d+ is 'ac' instead of 'ab'"):
        DraftWeights(*speculating(other), llama)
    small = make_model("llama", folder / "small", vocab_size=300)
    with pytest.raises(ConfigError, match=r"it has 300 tokens instead of 512\..* ngram or suffix"):
        DraftWeights(*speculating(small), llama)


def test_a_draft_model_that_cannot_roll_back_is_refused(llama, folder):
    with pytest.raises(ConfigError, match=r"keeps recurrent state"):
        DraftWeights(*speculating(make_model("mamba2", folder / "mamba2")), llama)


def test_a_draft_model_that_is_not_there_is_refused(llama, folder):
    with pytest.raises(ModelNotFound):
        DraftWeights(*speculating(folder / "nowhere"), llama)


def test_its_memory_is_in_the_prediction(llama):
    config, spec = speculating(llama)
    prepared = prepare(llama, dtype="float32", trust_remote_code=False)
    facts = registry.inspect(prepared.model, prepared.config)
    draft = DraftWeights(config, spec, llama)
    alone = predict(config, SingleRank(), prepared, facts, None, 0)
    both = predict(config, SingleRank(), prepared, facts, draft, 0)
    assert both.weights == 2 * alone.weights
    assert both.kv == 2 * alone.kv


def test_the_start_up_line_says_who_drafts_or_why_nobody_does(runner):
    _, spec = speculating("some/model")
    recurrent = SimpleNamespace(supports_rollback=False)
    assert describe(None, runner.facts) == "off"
    assert describe(spec, runner.facts) == "draft_model some/model, up to 15 tokens a step, control cost"
    assert describe(spec, recurrent).startswith("off: the model keeps recurrent state")
