"""What must hold between settings, and settings from the keywords of `phalanx.LLM`.

A range of a single setting is declared in `config.py`. Does not know where settings come from; messages name flags.
"""

from __future__ import annotations

from phalanx.config import EngineConfig
from phalanx.dist.fault_injection import parse
from phalanx.errors import ConfigError


def check_engine(config: EngineConfig) -> EngineConfig:
    """The settings themselves, if they do not contradict each other.

    Raises:
        ConfigError: names the flags.
    """
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.max_num_seqs}: every running row needs a token per step.",
            remedy=f"Use --max-num-batched-tokens {config.max_num_seqs} or more.",
        )
    if config.inject is not None and (rank := parse(config.inject).rank) >= config.tensor_parallel_size:
        raise ConfigError(f"--inject {config.inject!r}: there is no rank {rank}.")
    if config.tensor_parallel_size == 1:
        unused = {"--backend": config.backend != "auto", "--collective": config.collective != "auto"}
        for flag in (flag for flag, given in unused.items() if given):
            raise ConfigError(f"{flag} says how several ranks talk, but there is one.", remedy="Add --tp N.")
    return config
