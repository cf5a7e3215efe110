"""The set of replicas: checks their health, and applies the user's changes while requests run.

`dispatcher.py` assigns requests to them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from phalanx.errors import ConfigError
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.replica import VIA, Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthReport, HealthRules, report_of
from phalanx.gateway.dispatch.replica_models import cards_in, names_in, tags_in
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.replicas_file import ReplicaSpec
from phalanx.http.foreign_json import decoder

log = logging.getLogger(__name__)

NO_SUCH_PATH = frozenset((404, 405, 501))
"""Statuses of other vendors' servers for a path that they do not have."""
MODELS = "/v1/models"
TAGS = "/api/tags"
MAX_BYTES = 512 << 10
"""Bytes of a /health or /v1/models: the models of a vLLM with 800 adapters, read in 50 ms of the loop's time."""
REASON_CHARS = 200
MAX_CHANGES = 50  # of replicas, that are remembered


class _Reason(msgspec.Struct):
    reason: str = ""


_read_reason = decoder(_Reason)


class Fleet:
    """See the module's docstring.

    Args:
        session_of: returns the HTTP session for a replica.
        note_end: called with each health-check task that has ended.
    """

    def __init__(
        self,
        config: GatewayConfig,
        dispatcher: AsyncDispatcher,
        session_of: Callable[[ReplicaSpec], aiohttp.ClientSession],
        note_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._session_of = session_of
        self._note_end = note_end
        self._health = HealthRules(config.health_failure_threshold, config.health_success_threshold)
        self._breaker = BreakerRules(
            failures=config.cb_failure_threshold,
            successes=config.cb_success_threshold,
            open_s=config.cb_timeout_duration_secs,
            window_s=config.cb_window_duration_secs,
        )
        self._checking: dict[Replica, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """Replica -> its task of checks, and the event that ends the pause between two checks."""
        self.changes: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_CHANGES)
        """What befell replicas, numbered, as the page shows it."""
        self._n_changes = 0
        self._listing: asyncio.Task[list[list[dict[str, Any]]]] | None = None
        """Asks the replicas for `tags`."""

    @property
    def replicas(self) -> dict[str, Replica]:
        """The replicas by name."""
        return self._dispatcher.core.replicas

    def apply(self, specs: Iterable[ReplicaSpec]) -> list[Replica]:
        """Serve exactly these replicas. Those that stay keep their state. Returns the removed ones."""
        removed: list[Replica] = []
        wanted = {spec.name: spec for spec in specs}
        for name, replica in list(self.replicas.items()):
            spec = wanted.get(name)
            if spec is None or (spec.url, spec.key) != (replica.spec.url, replica.spec.key):
                removed.append(self.remove(name))
            else:
                replica.spec = spec
        for name, spec in wanted.items():
            if name not in self.replicas:
                self.add(spec)
        self._dispatcher.settle()
        return removed

    def add(self, spec: ReplicaSpec) -> Replica:
        """One more replica, which gets requests once its first check is good.

        Raises:
            ConfigError: there is one with this name or URL.
        """
        for other in self.replicas.values():
            if spec.name == other.name or spec.url == other.spec.url:
                raise ConfigError(f"There is a replica {other.name} at {other.spec.url}.")
        replica = Replica(spec, self._health, self._breaker)
        self._dispatcher.core.add(replica)
        at_once = asyncio.Event()
        task = asyncio.create_task(self._keep_checking(replica, at_once))
        task.add_done_callback(self._note_end)
        self._checking[replica] = task, at_once
        log.info("replica %s: %s", spec.name, spec.url)
        return replica

    def remove(self, name: str) -> Replica:
        """Send a replica no new requests; its running ones continue."""
        replica = self._dispatcher.core.remove(name)
        log.info("replica %s is removed, with %d requests running", name, replica.in_flight)
        if not replica.in_flight:
            self._stop_checking(replica)
        self._dispatcher.settle()
        return replica

    def set_draining(self, name: str, draining: bool) -> Replica:
        """Stop sending a replica new requests, or resume."""
        replica = self.replicas[name]
        replica.is_draining = draining
        self._dispatcher.settle()
        return replica

    def check_now(self, replica: Replica) -> None:
        """Check a replica at once, or right after a check that is under way."""
        if replica in self._checking:
            self._checking[replica][1].set()

    async def close(self) -> None:
        """Stop all checks."""
        tasks: list[asyncio.Task[Any]] = [task for task, _ in self._checking.values()]
        tasks += [self._listing] if self._listing is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def tags(self) -> list[list[dict[str, Any]]]:
        """The models that each replica lists at /api/tags; empty for one that is down or has no such list.

        Concurrent clients share one listing: many would take the replicas' connections from requests.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._all_tags())
        return await asyncio.shield(self._listing)

    # Checks ----------------------------------------------------------------------------------------------------

    async def _all_tags(self) -> list[list[dict[str, Any]]]:
        up = [replica for replica in self.replicas.values() if replica.health.state == "up"]
        return list(await asyncio.gather(*map(self._tags, up)))

    def _stop_checking(self, replica: Replica) -> None:
        if replica in self._checking:
            self._checking.pop(replica)[0].cancel()

    async def _keep_checking(self, replica: Replica, at_once: asyncio.Event) -> None:
        """Check until the replica is removed and has no requests."""
        loop = asyncio.get_running_loop()
        while not (replica.is_removed and not replica.in_flight):
            begun, own = loop.time(), replica.in_flight
            check = await self._check(replica)
            changed = replica.health.note(check, begun, loop.time())
            replica.note_load(own)
            if check.ok:
                replica.is_suspect = replica.needs_check = False
            if changed:
                self._note_change(replica)
            self._dispatcher.settle()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_check_interval_secs):
                    await at_once.wait()
            at_once.clear()
        self._checking.pop(replica, None)

    def _note_change(self, replica: Replica) -> None:
        health = replica.health
        self._n_changes += 1
        self.changes.append((self._n_changes, _shown_change(replica)))
        if health.state == "up":
            replica.breaker.reset()  # failures before the restart do not count
            replica.refused_key = None
            names = ", ".join(sorted(replica.models)) if replica.models is not None else "any model"
            log.info("replica %s is up: %s, %d requests at once", replica.name, names, replica.limit)
        else:
            if not health.keeps_prefixes:
                self._dispatcher.core.forget_cache(replica.name)
            log.warning("replica %s is down: %s", replica.name, health.reason)

    async def _check(self, replica: Replica) -> Check:
        """Ask for health and models, within the time of one check."""
        limit = self._config.health_check_timeout_secs
        try:
            async with asyncio.timeout(limit):
                return await self._ask(replica)
        except TimeoutError:
            return Check(ok=False, answered=False, reason=f"does not answer health checks within {limit:g} s")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Check(ok=False, answered=False, reason=f"cannot be reached ({_one_line(error)})")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Check(ok=False, answered=False, reason=f"fails health checks ({_one_line(error)})")

    async def _ask(self, replica: Replica) -> Check:
        path = self._config.health_check_endpoint
        status, body = await self._get(replica, path)
        has_health = status not in NO_SUCH_PATH
        if has_health and status != 200:
            return Check(ok=False, reason=f"answers {status} to {path}{_why(body)}")
        models_status, models = await self._get(replica, MODELS)
        if models_status == 200 and (cards := cards_in(models)) is not None:
            replica.cards, replica.models = cards, names_in(cards)
        elif models_status in (401, 403):
            return Check(
                ok=False, reason=f"answers {models_status} to {MODELS}: it asks for another key (--worker-key)"
            )
        elif not has_health:
            return Check(ok=False, reason=f"answers {status} to {path} and {models_status} to {MODELS}")
        elif models_status in NO_SUCH_PATH:
            replica.cards, replica.models = [], None
        return Check(ok=True, report=report_of(body) if has_health else HealthReport())

    async def _tags(self, replica: Replica) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(self._config.health_check_timeout_secs):
                status, body = await self._get(replica, TAGS)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            log.info("replica %s does not list its models: %s", replica.name, _one_line(error))
            return []
        return tags_in(body) if status == 200 else []

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        """Status and body.

        Raises:
            ValueError: the body is too large.
        """
        headers = {"Accept-Encoding": "identity", "Via": VIA}
        if replica.spec.key is not None:
            headers["Authorization"] = f"Bearer {replica.spec.key}"
        session = self._session_of(replica.spec)
        async with session.get(replica.spec.url + path, headers=headers, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MAX_BYTES:
                    raise ValueError(f"{path} has more than {MAX_BYTES >> 10} KiB")
            return response.status, bytes(body)


def describe(replica: Replica, now: float) -> dict[str, Any]:
    """A replica for the admin API."""
    return {
        "name": replica.name,
        "url": replica.spec.url,
        "state": "draining" if replica.is_draining else replica.health.state,
        "reason": replica.reason(now),
        "models": sorted(replica.models) if replica.models is not None else None,
        "in_flight": replica.in_flight,
        "others": replica.others,
        "limit": replica.limit,
        "weight": replica.spec.weight,
        "has_key": replica.spec.key is not None,
        "can_migrate": replica.can_migrate,
    }


def _shown_change(replica: Replica) -> dict[str, Any]:
    is_up = replica.health.state == "up"
    if is_up:
        did = "It gets requests."
    else:
        did = "It gets no requests" + (", and its streams go on elsewhere." if replica.can_migrate else ".")
    return {
        "at": round(time.time(), 1),
        "what": f"The replica {replica.name} {'is up' if is_up else replica.health.reason}.",
        "cause": "",
        "did": did,
        "remedy": "" if is_up else f"Look at the server of {replica.name}: `phalanx status`, `phalanx logs`.",
        "gap_seconds": None,
        "is_good": is_up,
    }


def _one_line(error: BaseException) -> str:
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if refused := re.search(r"\[Errno (\d+)\] Connect call failed", str(inner)):
        return os.strerror(int(refused[1]))  # asyncio's own words have the address, which is the admin's
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return " ".join(str(text).split())[:REASON_CHARS]


def _why(body: bytes) -> str:
    """The reason in the body of a phalanx server's /health."""
    try:
        reason = _read_reason(body).reason
    except msgspec.DecodeError:
        reason = ""
    line = " ".join(reason.split())[:REASON_CHARS]
    return f": {line}" if line else ""
