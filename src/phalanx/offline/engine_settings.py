"""Refuses settings that contradict each other, the model or this machine, and reads the keywords of `phalanx.LLM`.

`config.py` declares the range of each setting. Messages name flags.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from phalanx import memory
from phalanx.config import GIB, MAX_RANKS, EngineConfig, check_disk_flags
from phalanx.dist.fault_injection import parse
from phalanx.dist.gpus import usable_gpus
from phalanx.errors import ConfigError, MemoryShortage, ModelError
from phalanx.model.model_limits import check_limits
from phalanx.spec.parse_config import parse as parse_speculation
from phalanx.text.model_files import read_json


def check_engine(config: EngineConfig) -> EngineConfig:
    """The settings themselves, if they do not contradict each other.

    Raises:
        ConfigError: names the flags.
    """
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.max_num_seqs}: every running row needs a token per step.",
            remedy=f"Use --max-num-batched-tokens {config.max_num_seqs} or more.",
        )
    _check_stages(config)
    given = {
        "--prefix-cache-dir": config.prefix_cache_dir is not None,
        "--prefix-cache-disk-gb": config.prefix_cache_disk_gb is not None,
        "--verify-restores": config.verify_restores,
    }
    check_disk_flags([flag for flag, is_given in given.items() if is_given])
    if config.trace is not None:
        check_trace(Path(config.trace))
    if config.inject is not None and (rank := parse(config.inject).rank) >= config.n_ranks:
        raise ConfigError(f"--inject {config.inject!r}: there is no rank {rank}.")
    if max(config.widths) == 1:
        unused = {"--backend": config.backend != "auto", "--collective": config.collective != "auto"}
        for flag in (flag for flag, given in unused.items() if given):
            where = "there is one" if config.pipeline_parallel_size == 1 else "each stage has one"
            raise ConfigError(
                f"{flag} says how several ranks talk, but {where}.", remedy=f"Add --tp N, or leave {flag} out."
            )
    return config


def check_start(config: EngineConfig, path: Path, *, is_here: bool = True) -> None:
    """Refuse flags that the model or this machine cannot follow, before ranks start and each reports them.

    Args:
        path: the model's directory. The ranks report what is wrong with its files.
        is_here: whether all ranks run on this machine.

    Raises:
        ModelUnsupported, ConfigError: as `check_limits`.
        MemoryShortage: the KV caches are larger than this machine's memory.
    """
    if is_here and config.kv_cache_gb is not None and not usable_gpus():
        _check_kv_cache(config, config.kv_cache_gb)
    try:
        model = read_json(path / "config.json")
    except (FileNotFoundError, ModelError):
        return
    check_limits(config, model)


def _check_kv_cache(config: EngineConfig, kv_cache_gb: float) -> None:
    """Compare --kv-cache-gb, which each rank takes, with this machine's whole memory; ranks compare what is free."""
    total_gb = memory.read_machine().total / GIB
    if kv_cache_gb * config.n_ranks > total_gb:
        of_each = f" for each of {config.n_ranks} ranks" if config.n_ranks > 1 else ""
        raise MemoryShortage(
            f"--kv-cache-gb {kv_cache_gb:g}{of_each} is more than this machine's memory of {total_gb:.1f} GiB.",
            remedy="Leave it out: then the KV cache takes 60 % of what the weights leave.",
        )


def check_trace(file: Path) -> None:
    """Refuse a trace that rank 0 could not write, before it loads the model. Makes no file.

    Raises:
        ConfigError: says why.
    """
    try:
        why = errno.EISDIR if file.is_dir() else 0 if file.parent.is_dir() else errno.ENOENT
        if not why and not os.access(file if file.exists() else file.parent, os.W_OK):
            why = errno.EACCES
    except OSError as error:
        why = error.errno or errno.EACCES
    if why:
        raise ConfigError(
            f"--trace {file} cannot be written: {os.strerror(why)}.", remedy="Name a file that can be made there."
        )


def _check_stages(config: EngineConfig) -> None:
    """The flags that say how many ranks and stages there are go together."""
    stages, widths = config.pipeline_parallel_size, config.widths
    if len(widths) != stages:
        raise ConfigError(
            f"--tp {','.join(map(str, widths))} is for {len(widths)} stages, but --pp is {stages}.",
            remedy=f"Use --pp {len(widths)}, or give --tp one number.",
        )
    if config.n_ranks > MAX_RANKS:
        raise ConfigError(
            f"--tp and --pp ask for {config.n_ranks} ranks; {MAX_RANKS} are the most.", remedy="Lower one of them."
        )
    if stages == 1 and (config.pp_split is not None or config.pp_activation_dtype != "model"):
        flag = "--pp-split" if config.pp_split is not None else "--pp-activation-dtype"
        raise ConfigError(f"{flag} is for stages, and there is one.", remedy="Add --pp N.")
    if config.pp_split is not None and len(config.pp_split) != stages:
        raise ConfigError(
            f"--pp-split {','.join(map(str, config.pp_split))} and --pp {stages} differ in the number of stages.",
            remedy="Give the number of layers of each stage.",
        )


def engine_config(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from keywords.

    Args:
        settings: fields of `EngineConfig`; `speculative_config` may be a dictionary, as the flag's JSON.

    Raises:
        ConfigError: an unknown name, a wrong type, a number out of its range, or a contradiction; names the setting.
    """
    for name in settings:
        if name not in EngineConfig.__struct_fields__ or name == "model":
            close = get_close_matches(name, EngineConfig.__struct_fields__, n=1)
            raise ConfigError(
                f"There is no setting {name!r}.",
                remedy=f"Did you mean {close[0]!r}?"
                if close
                else "Settings are the engine's flags of `phalanx serve`.",
            )
    values = {"model": str(model), **settings}
    if isinstance(speculation := values.get("speculative_config"), Mapping):
        values["speculative_config"] = parse_speculation(msgspec.json.encode(speculation).decode())
    try:
        return check_engine(msgspec.convert(values, EngineConfig))
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ConfigError(
            f"{name}={values[name]!r}: {what[:1].lower()}{what[1:]}.",
            remedy="`phalanx serve --help` shows what is allowed.",
        ) from error
