"""What the page and `phalanx top` see of a gateway: its replicas, requests and moves; and the life of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from phalanx import __version__
from phalanx.errors import UnknownPath
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.fleet import Fleet, describe
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.relay.attempt import request_headers
from phalanx.gateway.relay.replica_sessions import ReplicaSessions
from phalanx.gateway.relay.request_trails import MAX_TRAILS, RequestTrail, RequestTrails
from phalanx.gateway.settings.clients import Clients
from phalanx.http.api_keys import ApiKeys
from phalanx.http.foreign_json import decoder
from phalanx.http.http_exchange import Answer, EventStream, Exchange, json_answer
from phalanx.http.overview_stream import OverviewStream

MAX_ROWS = 50  # requests that are over, shown beside those that run
ASK_S = 5.0  # for a replica's part of a life
LIFE_BYTES = 1 << 18  # of that part
PUBLIC = ("name", "state", "reason", "models", "in_flight", "others", "limit", "weight", "can_migrate")
"""What of a replica every client may see; its address is the admin's."""

_read_life = decoder(dict[str, Any])


class GatewayOverview:
    """Answers `GET /v1/overview/events` and `GET /v1/requests/{id}`.

    Args:
        admin_key: who has it sees all requests; None: there is none.
        policy: how replicas are chosen.
    """

    def __init__(
        self,
        dispatcher: AsyncDispatcher,
        clients: Clients,
        fleet: Fleet,
        trails: RequestTrails,
        sessions: ReplicaSessions,
        *,
        admin_key: str | None,
        policy: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._fleet = fleet
        self._trails = trails
        self._sessions = sessions
        self._policy = policy
        self._admin = None if admin_key is None else ApiKeys([admin_key])
        self.is_over: Callable[[], bool] = lambda: False
        """Whether the gateway ends."""
        self._stream = OverviewStream(self.parts, self._is_over, lambda: dispatcher.clock())

    def guard(self, exchange: Exchange) -> None:
        """Let clients and the admin in.

        Raises:
            InvalidApiKey: it is neither.
        """
        exchange.owner = "" if self._is_admin(exchange) else self._clients.owner(exchange.headers)

    async def events(self, exchange: Exchange) -> EventStream:
        """What this gateway does, as a stream: a snapshot, then changes, at most four a second."""
        return self._stream.open(self._whose(exchange))

    async def life(self, exchange: Exchange) -> Answer:
        """The life of a request: its way through the replicas, and what each that had it tells."""
        id, owner = exchange.rest, self._whose(exchange)
        trail = self._trails.find(id, owner)
        asked = self._that_had(trail) if trail is not None else self._that_know(exchange)
        lives = [life for life in await asyncio.gather(*(self._ask(one, exchange, id) for one in asked)) if life]
        if trail is None and not lives:
            raise UnknownPath(
                f"No request {id[:80]!r} of this key is among the gateway's last {MAX_TRAILS}. Its id is the answer's "
                "header x-request-id."
            )
        return json_answer(_joined(id, trail, lives, self._dispatcher.clock()))

    def parts(self, owner: str | None) -> dict[str, Any]:
        """What a viewer sees. `owner`: whose requests; None: everyone's."""
        now, core = self._dispatcher.clock(), self._dispatcher.core
        parts: dict[str, Any] = {
            "server": {
                "kind": "gateway",
                "version": __version__,
                "policy": self._policy,
                "running": core.in_flight,
                "waiting": core.n_waiting,
                "limit": sum(one.limit for one in core.replicas.values() if one.is_available(now)),
                "phase": "ready" if any(one.is_available(now) for one in core.replicas.values()) else "unavailable",
            }
        }
        for name, replica in core.replicas.items():
            told = describe(replica, now)
            parts[f"replicas/{name}"] = {field: told[field] for field in PUBLIC}
        for number, trail in self._trails.latest(MAX_ROWS, owner).items():
            parts[f"requests/{number}"] = {"number": number, **trail.row(now)}
        for number, change in self._fleet.changes:
            parts[f"events/{number}"] = change
        for name, move in self._trails.moves(owner).items():
            parts[f"moves/{name}"] = move
        return parts

    # -----------------------------------------------------------------------------------------------------------

    def _is_over(self, owner: str | None) -> bool:
        return self.is_over() or (owner is not None and not self._clients.accepts(owner))

    def _is_admin(self, exchange: Exchange) -> bool:
        return self._admin is not None and self._admin.may_see_details(exchange.headers)

    def _whose(self, exchange: Exchange) -> str | None:
        return None if self._is_admin(exchange) else exchange.owner or ""

    def _that_had(self, trail: RequestTrail) -> list[Replica]:
        replicas = self._dispatcher.core.replicas
        return [replicas[name] for name in dict.fromkeys(trail.replicas) if name in replicas]

    def _that_know(self, exchange: Exchange) -> list[Replica]:
        """The replicas that tell keys apart, for an id that only they know: the answer's."""
        up = [one for one in self._dispatcher.core.replicas.values() if one.health.state == "up"]
        return up if not self._clients.need_key else [one for one in up if one.admin_key is not None]

    async def _ask(self, replica: Replica, exchange: Exchange, id: str) -> dict[str, Any] | None:
        """The replica's part of a life; None if it has none, or is another program's server."""
        spec, is_admin = replica.spec, self._is_admin(exchange)
        headers = request_headers(
            exchange.request.headers.items(),
            request_id=exchange.id,
            owner=exchange.owner or "",
            key=spec.key,
            admin_key=replica.admin_key,
            pass_keys=not self._clients.need_key and spec.key is None and not spec.by_api and not is_admin,
        )
        if is_admin and replica.admin_key is not None:
            headers["x-api-key"] = replica.admin_key
        url = f"{spec.url}/v1/requests/{quote(id, safe='')}"
        try:
            async with asyncio.timeout(ASK_S):
                async with self._sessions.of(spec).get(url, headers=headers, allow_redirects=False) as response:
                    body = await response.content.read(LIFE_BYTES)
                    life = _read_life(body) if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError):
            return None
        return None if life is None else {**life, "replica": replica.name}


def _joined(id: str, trail: RequestTrail | None, lives: list[dict[str, Any]], now: float) -> dict[str, Any]:
    """The gateway's part and those of replicas, as one life. What replicas say is checked where it is used."""
    last: dict[str, Any] = lives[-1] if lives else {}
    joined = {**last, "object": "request", "replicas": lives, "story": trail.story() if trail is not None else []}
    for life in lives:
        story = life.get("story")
        lines = [str(line) for line in story] if isinstance(story, list) else []
        joined["story"] += [f"{life['replica']}: {line}" for line in lines]
    if trail is not None:
        seconds = last["seconds"] if isinstance(last.get("seconds"), dict) else {}
        total = round((trail.ended if trail.ended is not None else now) - trail.arrived, 3)
        joined |= {
            "id": id,
            "endpoint": trail.endpoint,
            "model": trail.model,
            "state": trail.state,
            "seconds": {**seconds, "total": total},
            "moves": len(trail.moves),
        }
    return joined
