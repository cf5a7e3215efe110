"""What the page and `phalanx top` see of a server: the server, its hosts and links, requests, events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from phalanx import __version__
from phalanx.http.error_responses import without_paths
from phalanx.http.http_exchange import EventStream, Exchange
from phalanx.http.overview_stream import OverviewStream
from phalanx.memory import guard_bytes, read_machine
from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.server.endpoints.overview_links import links
from phalanx.server.endpoints.request_lives import RequestLives
from phalanx.server.sequences.event_log import EventLog
from phalanx.server.sequences.request_log import RequestLog
from phalanx.server.sequences.request_story import row_json
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.types import EngineStats, ModelInfo, RankStats, SelfTest

MAX_ROWS = 50  # requests that are over, shown beside those that run

STEP = 26  # free memory is shown in steps of 64 MiB, so that the host does not change with every look


class ServerOverview:
    """Answers `GET /v1/overview/events`.

    Args:
        names: of the served model.
        is_over: of `OverviewStream`.
    """

    def __init__(
        self,
        config: ServerConfig,
        names: tuple[str, ...],
        engine: EngineClient,
        health: EngineHealth,
        request_log: RequestLog,
        lives: RequestLives,
        event_log: EventLog,
        is_over: Callable[[str | None], bool],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._names = names
        self._engine = engine
        self._health = health
        self._request_log = request_log
        self._lives = lives
        self._event_log = event_log
        self._clock = clock
        self._stream = OverviewStream(self.parts, is_over, clock)

    async def events(self, exchange: Exchange) -> EventStream:
        """What this server does, as a stream: a snapshot, then changes, at most four a second."""
        return self._stream.open(self._lives.whose(exchange))

    def parts(self, owner: str | None) -> dict[str, Any]:
        """What a viewer sees.

        Args:
            owner: whose requests; None: everyone's.
        """
        info, stats = self._engine.info, self._health.stats
        parts: dict[str, Any] = {"server": self._server(info, stats)}
        if stats is not None:
            parts |= {f"hosts/{host}": shown for host, shown in self._hosts(stats, info)}
            if found := self._links(stats, info):
                parts["links"] = found
        if info is not None and info.self_test is not None:
            parts["self_test"] = list(_self_test(info.self_test))
        progress, now = self._lives.progress(), self._clock()
        for life in self._request_log.latest(MAX_ROWS, owner):
            parts[f"requests/{life.id}"] = row_json(life, progress, now)
        return parts | self._event_log.shown(without_paths)

    def _server(self, info: ModelInfo | None, stats: EngineStats | None) -> dict[str, Any]:
        state = self._engine.state
        shown: dict[str, Any] = {
            "kind": "server",
            "version": __version__,
            "models": self._names,
            "phase": state.phase,
            "reason": without_paths(state.reason),
            "restarts": state.restarts,
            "limit": self._config.engine.max_num_seqs,
        }
        if state.progress is not None:
            progress = state.progress
            shown["progress"] = {"phase": progress.phase, "done": progress.done, "total": progress.total}
        if info is not None:
            shown |= {
                "model_type": info.model_type,
                "dtype": info.dtype,
                "quantization": info.quantization,
                "kernels": info.kernels.partition(":")[0],
                "context": info.max_model_len,
                "ranks": info.ranks,
                "stages": info.stages,
                "backend": info.backend,
                "drafts": info.speculation,
            }
            shown |= self._health.speeds()
        if stats is not None:
            shown |= {"running": stats.running, "waiting": stats.waiting, "preemptions": stats.preemptions}
            if stats.prefix_queries:
                shown["prefix_hit_rate"] = round(stats.prefix_hits / stats.prefix_queries, 3)
        return shown

    def _hosts(self, stats: EngineStats, info: ModelInfo | None) -> Iterable[tuple[str, dict[str, Any]]]:
        leader = stats.ranks[0].host if stats.ranks else ""
        ranks = sorted(stats.ranks, key=lambda rank: rank.host)
        for host, found in groupby(ranks, key=lambda rank: rank.host):
            here = list(found)
            shown: dict[str, Any] = {"ranks": [_rank(rank) for rank in here]}
            if host == leader and info is not None:
                shown["memory"] = self._memory(stats, info, here)
            yield host, shown

    def _links(self, stats: EngineStats, info: ModelInfo | None) -> list[dict[str, Any]]:
        faults = ((without_paths(what), age_s) for what, age_s in self._event_log.faults())
        return links(stats.ranks, None if info is None else info.self_test, faults)

    def _memory(self, stats: EngineStats, info: ModelInfo, here: Sequence[RankStats]) -> dict[str, int | None]:
        """Of the leader's host, in bytes: what its ranks hold, by the leader's figures, and what is free.

        The leader counts rows and prefixes for all layers, of which a rank of a stage holds its own.
        """
        machine = read_machine()
        n_layers = max((rank.layers[1] + 1 for rank in stats.ranks if rank.layers is not None), default=1)
        held = sum(1.0 if rank.layers is None else _n_layers(rank.layers) / n_layers for rank in here)
        rows, rows_budget, prefixes, prefixes_budget = (
            round(n * held)
            for n in (stats.kv_bytes, info.kv_budget_bytes, stats.prefix_bytes, info.prefix_budget_bytes)
        )
        return {
            "total": machine.total,
            "available": machine.available >> STEP << STEP,
            "guard": guard_bytes(machine, self._config.engine.memory_guard_gb),
            "weights": info.weights_bytes * len(here),
            "rows": rows,
            "rows_budget": rows_budget,
            "prefixes": prefixes,
            "prefixes_budget": prefixes_budget,
            "disk_blocks": None if self._config.engine.prefix_cache_dir is None else stats.disk_blocks,
        }


def _n_layers(layers: tuple[int, int]) -> int:
    return layers[1] - layers[0] + 1


def _rank(rank: RankStats) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "layers": rank.layers,
        "pid": rank.pid,
        "mismatches": rank.steps - rank.matches,
        "checked_sums": rank.reductions,
        "active": rank.active_bytes,
        "resident": rank.rss_bytes,
    }


def _self_test(test: SelfTest) -> Iterable[dict[str, Any]]:
    """What the self-test measured between the ranks."""
    for figure in test.all_reduce:
        units = ((20, "MiB"), (10, "KiB"), (0, "bytes"))
        size = next(f"{figure.bytes >> bits} {unit}" for bits, unit in units if figure.bytes >> bits or not bits)
        yield {"name": f"all-reduce of {size}", "latency_us": figure.median_us, "gb_per_s": figure.gb_per_s}
    yield {"name": "plan to all ranks and back", "latency_us": test.control_ms * 1000}
    yield {"name": f"step of one token ({test.reductions} checked sums)", "latency_us": test.step_ms * 1000}
