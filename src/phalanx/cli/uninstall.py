"""`phalanx uninstall`: takes away what `phalanx install` brought."""

from __future__ import annotations

import asyncio

from phalanx.cli.install import HostfileOption, HostNames, Row, names_of, show
from phalanx.cluster.installer import BareHost
from phalanx.cluster.releases import Releases
from phalanx.cluster.ssh import on_all
from phalanx.errors import PhalanxError

DELETE_S = 600.0  # tens of thousands of files, on a slow disk


def command(hosts: HostNames = None, hostfile: HostfileOption = None) -> int:
    """Delete phalanx on hosts where `phalanx install` put it. Logs and models stay."""
    names = names_of(hosts, hostfile)
    found = asyncio.run(on_all(map(BareHost, names), "uninstall", {}, Releases, timeout_s=DELETE_S))
    return show({name: _row(one) for name, one in found.items()})


def _row(one: Releases | PhalanxError) -> Row:
    if isinstance(one, PhalanxError):
        return one
    return ("", one.current, "deleted" if one.current else "nothing was installed")
