"""A model's shape is read from headers as ranks would keep it, and its layers are measured without the others."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from support.models import make_model
from support.planning import host

from phalanx.demo import MODEL_DIR
from phalanx.dist.topology import Room, Topology, split_layers
from phalanx.engine.calibration import (
    MAX_STEPS,
    READ,
    STEPS,
    TIMED_S,
    Bench,
    CalibrationRequest,
    chosen_layers,
    counts_of,
)
from phalanx.engine.model_shape_reader import ShardReducer, read_shape
from phalanx.memory import GB
from phalanx.model import registry
from phalanx.model.cache.layer_layout import page_tokens
from phalanx.model.loading import load
from phalanx.model.loading.stage_parts import read_parts
from phalanx.planning.candidates import Candidate, fit_memory
from phalanx.planning.model_shape import ModelShape, total
from phalanx.sched.admission import GRANULE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("shape") / "llama")


def test_the_shape_of_a_share_is_what_a_rank_keeps():
    shape = read_shape(MODEL_DIR, 4)
    assert shape.degrees == (1, 2, 4)
    assert shape.tokenizer_bytes == (MODEL_DIR / "tokenizer.json").stat().st_size
    for degree in shape.degrees:
        parts = shape.share(degree)
        prepared = load.prepare(MODEL_DIR, dtype="auto", trust_remote_code=False, reducer=ShardReducer(degree))
        assert total(parts.stage(0, shape.n_layers)).kept == prepared.weights_bytes
        assert parts.all_reduces == prepared.sums
    whole, half = shape.share(1), shape.share(2)
    assert half.kv_token_bytes == tuple(size // 2 for size in whole.kv_token_bytes)


def test_the_shape_of_stages_is_what_their_ranks_keep():
    shape = read_shape(MODEL_DIR, 1)
    for first, stop in ((0, 3), (3, 8)):
        prepared = load.prepare(
            MODEL_DIR, dtype="auto", trust_remote_code=False, choose_layers=lambda _, own=(first, stop): own
        )
        assert total(shape.whole.stage(first, stop)).kept == prepared.weights_bytes


@pytest.mark.parametrize("stages", [2, 3])
def test_a_plan_has_the_split_of_the_start(llama: Path, stages: int):
    hosts = tuple("abc"[:stages])
    for path in (MODEL_DIR, llama):
        found = fit_memory(
            read_shape(path, 1), Candidate(stages=stages, hosts=hosts), {name: host(name) for name in hosts}
        )
        started = split_layers(Topology((1,) * stages), read_parts(path), [Room(name, 60 * GB) for name in hosts])
        assert found.split == tuple(len(layers) for layers in started)


@pytest.mark.skipif(find_spec("phalanx_cpu") is None, reason="no native kernels")
def test_rows_are_counted_in_pages_where_ranks_have_them():
    command = [sys.executable, "-m", "phalanx.engine.model_shape_reader", str(MODEL_DIR), "1"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    facts = load.prepare(MODEL_DIR, dtype="auto", trust_remote_code=False)
    own = registry.inspect(facts.model, facts.config)
    assert msgspec.json.decode(done.stdout, type=ModelShape).page_tokens == page_tokens(own.layouts) < GRANULE


def test_models_of_one_name_and_other_shapes_have_other_keys(llama: Path):
    assert read_shape(llama, 1).key != read_shape(MODEL_DIR, 1).key
    assert read_shape(llama, 1).key == read_shape(llama, 1).key


def test_layers_are_the_first_two_and_others_spread_evenly():
    assert chosen_layers(8, 2) == [0, 1]
    assert chosen_layers(32, 4) == [0, 1, 2, 17]
    assert chosen_layers(3, 8) == [0, 1, 2]


def test_few_layers_and_so_many_more_that_caches_do_not_hold_them():
    assert counts_of([1 << 20] * 8) == (4, 8)  # a small model is measured whole
    few, more = counts_of([32 << 20] * 40)
    assert few == 2 and (more - few) * (32 << 20) >= 128 << 20
    assert counts_of([1 << 30] * 60) == (2, 4)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_bench_runs_real_steps_on_some_layers(degree: int):
    bench = Bench(CalibrationRequest(path=str(MODEL_DIR), degree=degree), 4)
    assert bench.count == 4
    assert bench.weights < load.prepare(MODEL_DIR, dtype="auto", trust_remote_code=False).weights_bytes
    for rows in (1, 4):
        seconds = bench.decode(rows, 32)
        assert STEPS <= len(seconds) <= MAX_STEPS and min(seconds) > 0
        assert sum(seconds) >= TIMED_S or len(seconds) == MAX_STEPS
    chunks = bench.prompt(READ)
    assert sum(chunk.tokens for chunk in chunks) < READ
    assert [chunk.context for chunk in chunks] == [sum(c.tokens for c in chunks[:i]) for i in range(len(chunks))]
    assert all(chunk.layers == 4 and chunk.tokens > 0 for chunk in chunks)


@pytest.mark.parametrize(("ranks_here", "degree", "tokens"), [(1, 1, 512), (2, 2, 512), (2, 1, 128)])
def test_a_prompt_is_timed_in_the_chunks_of_the_start(ranks_here: int, degree: int, tokens: int):
    chunks = Bench(CalibrationRequest(path=str(MODEL_DIR), degree=degree, ranks_here=ranks_here), 2).prompt(READ)
    assert chunks[0].tokens == tokens  # later ones are shorter where these take long
    assert max(chunk.tokens for chunk in chunks) == tokens
