"""A host that says it is a Mac: stand-ins for the system's tools, with a state that commands change.

Interfaces, addresses and cables are the rig's own and real; the bridge, RDMA, wired memory and launchd are entries of a
file. An RDMA port is active while its cable is in, its interface in no bridge, and the bridge down, as on a real Mac.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rig import Host

TOOLS = ("sysctl", "vm_stat", "ifconfig", "networksetup", "rdma_ctl", "ibv_devices", "ibv_devinfo", "launchctl")

SCRIPT = """#!{python}
import ipaddress, json, subprocess, sys
from pathlib import Path

STATE = Path({state!r})
state = json.loads(STATE.read_text())
tool, words = Path(sys.argv[0]).name, sys.argv[1:]


def links():
    text = subprocess.run(["/usr/sbin/ip", "-j", "address"], capture_output=True, text=True).stdout
    return {{link["ifname"]: link for link in json.loads(text)}}


def show(name):
    if name == "bridge0":
        flags = "UP,BROADCAST" if state["bridge_up"] else "BROADCAST"
        print(f"bridge0: flags=8863<{{flags}}> mtu 1500")
        for member in state["members"]:
            print(f"\\tmember: {{member}} flags=3<LEARNING,DISCOVER>")
        return
    link = links()[name]
    print(f"{{name}}: flags=8863<UP,BROADCAST> mtu 1500")
    for entry in link["addr_info"]:
        if entry["family"] == "inet":
            mask = int(ipaddress.ip_network(f"0.0.0.0/{{entry['prefixlen']}}").netmask)
            print(f"\\tinet {{entry['local']}} netmask {{mask:#010x}} broadcast 0.0.0.0")


def port(name):
    link = links().get(name, {{}})
    active = link.get("operstate") == "UP" and name not in state["members"] and not state["bridge_up"]
    return "PORT_ACTIVE (4)" if active else "PORT_DOWN (1)"


match tool, words:
    case "sysctl", ["-n", "kern.ostype"]:
        print("Darwin")
    case "sysctl", ["-n", "hw.memsize"]:
        print(state["memory"])
    case "vm_stat", []:
        print("Mach Virtual Memory Statistics: (page size of 16384 bytes)")
        print(f"Pages wired down:                     {{state['wired_pages']}}.")
    case "ifconfig", []:
        for name in [*links(), "bridge0"]:
            show(name)
    case "ifconfig", [name]:
        show(name)
    case "ifconfig", ["bridge0", "deletem", name]:
        if name not in state["members"]:
            sys.exit("ifconfig: BRDGDEL " + name + ": No such file or directory")
        state["members"].remove(name)
    case "ifconfig", ["bridge0", "addm", name]:
        state["members"].append(name)
    case "ifconfig", ["bridge0", "up" | "down" as way]:
        state["bridge_up"] = way == "up"
    case "ifconfig", [name, "inet", address, "netmask", mask]:
        bits = ipaddress.ip_network(f"0.0.0.0/{{mask}}").prefixlen
        subprocess.run(["/usr/sbin/ip", "address", "replace", f"{{address}}/{{bits}}", "dev", name], check=True)
    case "ifconfig", [name, "inet", address, "delete"]:
        for entry in links()[name]["addr_info"]:
            if entry["local"] == address:
                subprocess.run(
                    ["/usr/sbin/ip", "address", "del", f"{{address}}/{{entry['prefixlen']}}", "dev", name], check=True
                )
    case "networksetup", ["-listallhardwareports"]:
        for name, kind in state["ports"].items():
            print(f"\\nHardware Port: {{kind}}\\nDevice: {{name}}\\nEthernet Address: 00:00:00:00:00:00")
    case "rdma_ctl", ["status"]:
        print("enabled" if state["rdma"] else "disabled")
    case "ibv_devices", []:
        print("    device          	   node GUID\\n    ------          	----------------")
        for name in state["thunderbolt"]:
            print(f"    rdma_{{name}}        	0000000000000000")
    case "ibv_devinfo", []:
        for name in state["thunderbolt"]:
            print(f"hca_id:\\trdma_{{name}}\\n\\ttransport:\\t\\t\\tThunderbolt (5)")
            print(f"\\t\\tport:\\t1\\n\\t\\t\\tstate:\\t\\t\\t{{port(name)}}")
    case "launchctl", ["bootstrap", "system", path]:
        state["daemons"].append(path)
    case "launchctl", ["bootout", _]:
        state["daemons"].clear()
    case _:
        sys.exit(f"{{tool}}: a real Mac would know {{words}}, this one does not")
state["calls"] += [[tool, *words]]
STATE.write_text(json.dumps(state))
"""


class Mac:
    """The Mac's state, for tests to look at and to change."""

    def __init__(self, host: Host, thunderbolt: list[str]) -> None:
        self.host = host
        self._file = host.bin.parent / "mac.json"
        self._write(
            {
                "members": list(thunderbolt),
                "bridge_up": True,
                "rdma": True,
                "memory": 512 << 30,
                "wired_pages": 400_000,
                "thunderbolt": thunderbolt,
                "ports": {"eth0": "Ethernet", **{name: f"Thunderbolt {i}" for i, name in enumerate(thunderbolt, 1)}},
                "daemons": [],
                "calls": [],
            }
        )
        script = SCRIPT.format(python=sys.executable, state=str(self._file))
        for name in TOOLS:
            (host.bin / name).write_text(script)
            (host.bin / name).chmod(0o755)

    def __getitem__(self, name: str) -> Any:
        return json.loads(self._file.read_text())[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._write({**json.loads(self._file.read_text()), name: value})

    def _write(self, state: dict[str, Any]) -> None:
        fresh: Path = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._file)

    def remove(self) -> None:
        """The host is what it was."""
        for name in TOOLS:
            (self.host.bin / name).unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)
