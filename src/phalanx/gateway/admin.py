"""The admin API: list, add, drain, resume and remove replicas while requests run.

    GET    /admin/replicas
    POST   /admin/replicas                  {"name", "url", "weight", "max_in_flight", "key", "admin_key"}
    POST   /admin/replicas/NAME/drain       answers once its requests have ended, or after ?timeout=30 seconds
    POST   /admin/replicas/NAME/resume
    DELETE /admin/replicas/NAME             as drain; then its unfinished requests move to other replicas, or fail

An added replica gets only the keys given here: a holder of the admin key cannot learn the keys of other replicas.
`gateway_app.py` checks the admin key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from phalanx.errors import ConfigError, InvalidRequest, UnknownPath
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.fleet import Fleet, describe
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.relay.proxy import Proxy
from phalanx.gateway.settings.replicas_file import ReplicaFields
from phalanx.http.foreign_json import decoder
from phalanx.http.openapi import Operation

ROOT = "/admin/replicas"
CALLS = (
    Operation("GET", ROOT, "The replicas."),
    Operation("POST", ROOT, "Add a replica.", ReplicaFields),
    Operation("POST", ROOT + "/{name}/drain", "Send it no new requests; answers once its running ones have ended."),
    Operation("POST", ROOT + "/{name}/resume", "Send it requests again."),
    Operation("DELETE", ROOT + "/{name}", "Drain and remove it."),
)
WAIT_S = 30.0  # for a replica's requests, unless the caller says otherwise


_read = decoder(ReplicaFields)


class Admin:
    """See the module's docstring.

    Args:
        from_file: the --replicas file; with it, only changes to the file add and remove replicas.
    """

    def __init__(self, dispatcher: AsyncDispatcher, fleet: Fleet, proxy: Proxy, *, from_file: str | None) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._proxy = proxy
        self._from_file = from_file

    async def answer(self, method: str, path: str, query: Mapping[str, str], body: bytes, now: float) -> Any:
        """The JSON that answers a call.

        Raises:
            InvalidRequest: the call is not one of those above, or a field of it is wrong.
        """
        rest = unquote(path.removeprefix(ROOT)).strip("/").split("/")
        if path == ROOT and method == "GET":
            return {"replicas": [describe(replica, now) for replica in self._fleet.replicas.values()]}
        if path == ROOT and method == "POST":
            return describe(self._add(body), now)
        if len(rest) == 1 and rest[0] and method == "DELETE":
            return await self._remove(self._named(rest[0]), _timeout(query))
        if len(rest) == 2 and rest[1] in ("drain", "resume") and method == "POST":
            replica = self._fleet.set_draining(self._named(rest[0]).name, rest[1] == "drain")
            if rest[1] == "drain":
                await self._dispatcher.until_idle(replica, _timeout(query))
            return describe(replica, now)
        raise UnknownPath(f"{method} {path} is not a call of the admin API.")

    def _add(self, body: bytes) -> Replica:
        self._check_changeable()
        try:
            added = _read(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The body does not describe a replica: {error}.") from error
        try:
            return self._fleet.add(added.spec_by_api())
        except ConfigError as error:
            raise InvalidRequest(str(error)) from error

    async def _remove(self, replica: Replica, wait_s: float) -> dict[str, Any]:
        self._check_changeable()
        self._fleet.remove(replica.name)
        if not await self._dispatcher.until_idle(replica, wait_s):
            self._proxy.remove(replica, movable_only=False)
            await self._dispatcher.until_idle(replica, WAIT_S)
        return {"name": replica.name, "in_flight": replica.in_flight, "removed": True}

    def _named(self, name: str) -> Replica:
        replica = self._fleet.replicas.get(name)
        if replica is None:
            raise UnknownPath(f"There is no replica {name!r}.", code="replica_not_found")
        return replica

    def _check_changeable(self) -> None:
        if self._from_file is not None:
            raise InvalidRequest(f"The replicas are those of {self._from_file}; change that file.")


def _timeout(query: Mapping[str, str]) -> float:
    text = query.get("timeout", str(WAIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise InvalidRequest(f"timeout is {text!r}; it must be seconds, 0 to 86400.", param="timeout")
    return seconds
