"""Servers that are started alike on like machines have the same hash, and no others."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from support.serving import CONFIG, TEMPLATE, make_tokenizer

from phalanx.server.endpoints.determinism_key import determinism_key_of
from phalanx.server.outputs.output_formats import OutputFormats
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults
from phalanx.supervision.fake_engine import FAKE_INFO
from phalanx.text.tokenizer import Tokenizer

SERVED = ApiModel(
    names=("a",),
    max_n=2,
    max_prompts=2,
    defaults=GenerationDefaults(),
    eos_ids=frozenset({0}),
    template_kwargs={"x": 1},
)
MINE = determinism_key_of(CONFIG, SERVED, "t")(FAKE_INFO)


def test_what_does_not_count():
    """Names, limits, keys and what another start takes."""
    served = replace(SERVED, names=("b",), max_n=3, formats=OutputFormats())
    config = replace(CONFIG, queue=3, admin_key="k", engine=replace(CONFIG.engine, max_num_seqs=2))
    assert determinism_key_of(config, served, "t")(replace(FAKE_INFO, load_s=3.0, kv_budget_bytes=5)) == MINE


@pytest.mark.parametrize("change", [{"identity": "b"}, {"dtype": "float16"}, {"max_model_len": 9}])
def test_what_counts_of_the_model(change):
    assert determinism_key_of(CONFIG, SERVED, "t")(replace(FAKE_INFO, **change)) != MINE


@pytest.mark.parametrize("change", [{"template_kwargs": {"x": 2}}, {"defaults": GenerationDefaults(temperature=0.5)}])
def test_what_counts_of_the_server(change):
    assert determinism_key_of(CONFIG, replace(SERVED, **change), "t")(FAKE_INFO) != MINE
    assert determinism_key_of(replace(CONFIG, reasoning_parser="qwen3"), SERVED, "t")(FAKE_INFO) != MINE
    assert determinism_key_of(CONFIG, SERVED, "other")(FAKE_INFO) != MINE


def test_fingerprints_of_tokenizers(tmp_path):
    one, same = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b")
    templated = Tokenizer.load(tmp_path / "a", chat_template=TEMPLATE + "!")
    assert one.fingerprint() == same.fingerprint() != templated.fingerprint()
    file = tmp_path / "b" / "tokenizer.json"
    settings = json.loads(file.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["x"], vocabulary["z"] = vocabulary["z"], vocabulary["x"]
    file.write_text(json.dumps(settings))
    assert Tokenizer.load(tmp_path / "b").fingerprint() != one.fingerprint()
