"""Which flags a start refuses by the model's config.json and this machine's memory alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import EngineConfig
from phalanx.errors import ConfigError, MemoryShortage, ModelUnsupported
from phalanx.offline import engine_settings
from phalanx.offline.engine_settings import check_start

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
}  # fmt: skip


def directory(path: Path, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return path


def settings(*widths: int, pp: int = 1, length: int | None = None, kv: float | None = None) -> EngineConfig:
    tp = widths if len(widths) > 1 else sum(widths) or 1
    return EngineConfig(
        model="m", tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=length, kv_cache_gb=kv
    )


@pytest.mark.parametrize(
    ("config", "kind", "said", "remedy"),
    [
        (settings(8), ModelUnsupported, "--tp 8: m has 12 attention heads and ", "Use --tp 1, 2 or 4."),
        (settings(2, 5, 2, pp=3), ModelUnsupported, "--tp 2,5,2: m has 12 attention heads and ", "Use --tp 1, 2 or 4."),
        (settings(2, 5, pp=2), ModelUnsupported, "--tp 2,5: m has 12 attention heads and ", "Use --tp 1, 2 or 4."),
        (settings(pp=7), ConfigError, "--pp 7 needs a model of 7 layers at least; this one has 6.", "--pp 6 or less"),
        (
            settings(length=2049),
            ConfigError,
            "--max-model-len 2049 is beyond the model's own context of 2048",
            "smaller",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_flag_beyond_the_model_is_refused_with_numbers_that_work(
    config: EngineConfig, kind: type[ConfigError], said: str, remedy: str, nested: bool, tmp_path: Path
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    directory(model)
    if nested:
        (model / "config.json").write_text(json.dumps({"model_type": "vision", "text_config": CONFIG}))
    with pytest.raises(kind) as refused:
        check_start(config, model)
    assert refused.value.message.startswith(said) and remedy in refused.value.remedy


@pytest.mark.parametrize(
    "config", [settings(), settings(4), settings(12), settings(2, 4, pp=2), settings(pp=6), settings(length=2048)]
)
def test_what_the_model_can_do_passes(config: EngineConfig, tmp_path: Path) -> None:
    check_start(config, directory(tmp_path))


@pytest.mark.parametrize("fields", [{"num_attention_heads": None}, {"num_attention_heads": "x", "model_type": "mamba"}])
def test_the_ranks_judge_a_model_that_names_no_heads(fields: dict[str, Any], tmp_path: Path) -> None:
    check_start(settings(8), directory(tmp_path, **fields))


@pytest.mark.parametrize("text", [None, "[", '"a"'])
def test_the_ranks_report_a_config_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    check_start(settings(8, length=10**9), tmp_path)


def test_a_cache_larger_than_the_machine_is_refused_where_all_ranks_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = directory(tmp_path)
    total_gb = engine_settings.memory.read_machine().total / 2**30
    check_start(settings(4, kv=total_gb / 4.1), model)
    with pytest.raises(MemoryShortage, match=r"^--kv-cache-gb \S+ for each of 4 ranks is more than this machine's mem"):
        check_start(settings(4, kv=total_gb / 3.9), model)
    with pytest.raises(MemoryShortage, match=r"^--kv-cache-gb 90000 is more than this machine's memory of \d+\.\d GiB"):
        check_start(settings(kv=90000.0), model)
    check_start(settings(4, kv=90000.0), model, is_here=False)
    monkeypatch.setattr(engine_settings, "usable_gpus", lambda: ("GPU-1",))
    check_start(settings(4, kv=90000.0), model)
