"""Which hosts form which replica, and which host runs the gateway; every host of the cluster keeps this."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from phalanx.errors import ConfigError

MAX_HOSTS = 256  # of a cluster; `MAX_RANKS` of them make a group
REPLICAS_FILE = ".phalanx/gateway/replicas.toml"
"""The file of replicas of a gateway that `up` started, relative to the home directory."""


class ReplicaLayout(Struct, frozen=True, kw_only=True):
    """A cluster of several replicas. Hosts are named as for ssh."""

    replicas: Annotated[dict[str, tuple[str, ...]], Meta(max_length=MAX_HOSTS)]  # name -> its hosts, in rank order
    gateway: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host, once: those of the replicas, then the gateway's if it is another one."""
        return tuple(dict.fromkeys([*(host for hosts in self.replicas.values() for host in hosts), self.gateway]))

    @property
    def servers(self) -> tuple[str, ...]:
        """The host of each replica's server."""
        return tuple(host for hosts in self.replicas.values() for host in hosts[:1])

    def hosts_of(self, replica: str) -> tuple[str, ...]:
        """The hosts of one replica, in rank order.

        Raises:
            ConfigError: unknown name; lists the known ones.
        """
        if replica not in self.replicas:
            raise ConfigError(f"There is no replica {replica!r}.", remedy=f"There are {', '.join(self.replicas)}.")
        return self.replicas[replica]
