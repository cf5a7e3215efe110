"""Plans for hosts of the rig: each measures itself, the link between them counts, and what is recommended starts."""

from __future__ import annotations

import json

from clusters import phalanx
from rig import Rig

GUARD = ["--memory-guard-gb", "0.5"]


def plans(hosts: Rig, *words: str) -> dict[str, dict]:
    """Plans by stages, width and replicas, and under "best" the recommended one."""
    found = json.loads(phalanx(hosts["desk"], "plan", "demo", "2.json", *GUARD, "--json", *words).stdout)
    by_shape = {}
    for one in found["plans"]:
        shape = one["fit"]["candidate"]
        by_shape[f"{shape['stages']}x{shape['width']}x{shape['replicas']}"] = one
    return {**by_shape, "best": found["recommended"]["plan"]}


def test_hosts_measure_themselves_once_and_a_slow_link_counts(hosts: Rig):
    first = plans(hosts)
    assert first.keys() == {"1x1x1", "1x2x1", "2x1x1", "1x1x2", "best"}
    kept = {name: (hosts[name].home / ".phalanx/calibrations.json").read_text() for name in "ab"}
    with hosts["b"].delayed(20.0):
        slow = plans(hosts)
    after = {name: (hosts[name].home / ".phalanx/calibrations.json").read_text() for name in "ab"}
    assert after == kept  # only links are measured again
    assert slow["1x1x1"]["speed"] == first["1x1x1"]["speed"]
    assert slow["1x2x1"]["speed"]["limit"] == "link latency"
    assert slow["1x2x1"]["speed"]["tokens_per_s"]["1"] < first["1x2x1"]["speed"]["tokens_per_s"]["1"]
    best = slow["best"]["fit"]["candidate"]
    assert (best["stages"], best["width"], best["replicas"]) == (1, 1, 1)


def test_up_starts_what_is_recommended_and_status_has_the_prediction(hosts: Rig):
    with hosts["b"].delayed(20.0):
        words = ("up", "2.json", "--", "demo", "--host", "0.0.0.0", "--kv-cache-gb", "0.2", *GUARD)
        done = phalanx(hosts["desk"], *words)
        assert "(1 host)" in done.stdout
        first, *_ = done.stderr.splitlines()
        assert first.startswith("plan: one rank (--tp 1). ") and "`-- MODEL --tp 2` starts all 2 hosts." in first
        shown = json.loads(phalanx(hosts["desk"], "status", "2.json", "--json", check=False).stdout)
        (served,) = [host for host, found in shown.items() if found["health"]]
        predicted = shown[served]["health"]["predicted"]
        assert predicted["tokens_per_second"] > 0 and predicted["ttft_seconds"] > 0
        assert "predicted " in phalanx(hosts["desk"], "status", "--hosts", served).stdout
        phalanx(hosts["desk"], "down", "--hosts", served)
