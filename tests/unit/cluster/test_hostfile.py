"""Hostfiles: what is read, what is written, what is refused with which words (F2)."""

from __future__ import annotations

import json

import pytest

from phalanx.cluster.hostfile_parser import Host, Hostfile, check_matrix, from_names, parse, render
from phalanx.config import HostConfig
from phalanx.errors import ConfigError

FOUR = {
    "backend": "jaccl",
    "envs": ["MLX_METAL_FAST_SYNCH=1"],
    "hosts": [
        {"ssh": f"m{i}", "ips": [f"10.0.0.{i + 1}"], "rdma": [None if i == j else f"rdma_en{j}" for j in range(4)]}
        for i in range(4)
    ],
}


def test_hostfiles_of_mlx_launch_are_read():
    found = parse(json.dumps(FOUR), "hosts.json")
    assert found.backend == "jaccl" and found.envs == ("MLX_METAL_FAST_SYNCH=1",)
    assert [host.ssh for host in found.hosts] == ["m0", "m1", "m2", "m3"]
    assert found.hosts[1].rdma == ("rdma_en0", None, "rdma_en2", "rdma_en3")


def test_a_list_of_hosts_alone_is_a_hostfile():
    found = parse('[{"ssh": "a", "ips": ["::1"]}, {"ssh": "me@b"}]', "x")
    assert found == Hostfile(hosts=(Host(ssh="a", ips=("::1",)), Host(ssh="me@b")))
    assert found.hosts[1].address == "b"


def test_several_devices_towards_one_host():
    text = '[{"ssh": "a", "rdma": [null, ["rdma_en3", "rdma_en5"]]}, {"ssh": "b", "rdma": ["rdma_en5", null]}]'
    assert parse(text, "x").hosts[0].rdma == (None, ("rdma_en3", "rdma_en5"))


@pytest.mark.parametrize("value", [FOUR, [{"ssh": "a"}, {"ssh": "b", "ips": ["10.0.0.2", "10.0.1.2"]}]])
def test_a_written_hostfile_reads_back_equal(value):
    found = parse(json.dumps(value), "x")
    assert parse(render(found), "y") == found
    assert json.loads(render(found))["hosts"][0]["ssh"] == found.hosts[0].ssh


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("{}", "no list `hosts`"),
        ('{"hosts": [], "port": 1}', "unknown field 'port'"),
        ('{"hosts": []}', "names 0 hosts; 1 to 256"),
        ('{"hosts": ["a"]}', "host 0 is not an object"),
        ('[{"ssh": ""}]', "`ssh` is not a name"),
        ('[{"ssh": "a", "ips": ["ten"]}]', r"host 0 \(a\): `ips`"),
        ('[{"ssh": "a", "rmda": []}]', "unknown field 'rmda'"),
        ('[{"ssh": "a"}, {"ssh": "a"}]', "ssh 'a' is there twice"),
        ('[{"ssh": "a", "ips": ["1.1.1.1"]}, {"ssh": "b", "ips": ["1.1.1.1"]}]', "ips '1.1.1.1' is there twice"),
        ('{"backend": "infiniband", "hosts": [{"ssh": "a"}]}', "backend 'infiniband'"),
        ('{"envs": "A=1", "hosts": [{"ssh": "a"}]}', "envs is not a list of NAME=value"),
        ('{"envs": ["NOVALUE"], "hosts": [{"ssh": "a"}]}', "envs: 'NOVALUE' has no value"),
        ('{"envs": ["LD_PRELOAD=/x.so"], "hosts": [{"ssh": "a"}]}', "envs: LD_PRELOAD may not be set"),
        ('{"envs": ["A=x\\nLD_PRELOAD=/x"], "hosts": [{"ssh": "a"}]}', "envs: the value of A has a line break"),
        ('[{"ssh": "a", "rdma": [null, 5]}, {"ssh": "b"}]', "`rdma` has 5"),
        ('[{"ssh": "a", "rdma": [null]}, {"ssh": "b"}]', "`rdma` of a has 1 entries for 2 hosts"),
        ('[{"ssh": "a", "rdma": ["x", "x"]}, {"ssh": "b", "rdma": ["x", null]}]', "a names a device towards itself"),
        ('[{"ssh": "a", "rdma": [null, "x"]}, {"ssh": "b", "rdma": [null, null]}]', "a has an RDMA device towards b"),
        ('[{"ssh": "a", "gpus": "8"}]', r"host 0 \(a\): `gpus` is not a number of GPUs: '8'"),
        ("[" * 100_000, "hosts.json is not JSON"),
        ('[{"ssh": "-oProxyCommand=x"}]', "'-oProxyCommand=x' is not the name of a host"),
        ('[{"ssh": "a b"}]', "'a b' is not the name of a host"),
        ('[{"ssh": "a\\u0000"}]', "is not the name of a host"),
        ('[{"ssh": "\\ud800"}]', "is not the name of a host"),
        ('[{"ssh": "a", "ssh": "b"}]', "a field 'ssh' is there twice in one object"),
        ('[{"ssh": "a", "ips": ["::1"]}, {"ssh": "b", "ips": ["0::1"]}]', "ips '::1' is there twice"),
        ('[{"ssh": "a", "ips": ["0.0.0.0"]}]', r"host 0 \(a\): `ips`"),
        ('[{"ssh": "a", "gpus": 99999999999999999999}]', "`gpus` is not a number of GPUs"),
        ('{"envs": ["A=\\ud800"], "hosts": [{"ssh": "a"}]}', "envs: the value of A has"),
        ('[{"ssh": "x;id"}]', "'x;id' is not the name of a host"),
        ('[{"ssh": "`id`@b"}]', "is not the name of a host"),
        ('[{"ssh": "$(id)"}]', "is not the name of a host"),
        ('[{"ssh": "a@-oProxyCommand=id"}]', "is not the name of a host"),
        ('[{"ssh": "a\\\\b"}]', "is not the name of a host"),
        ('[{"ssh": "a", "ips": ["fe80::1%$(id)"]}]', r"host 0 \(a\): `ips`"),
        ('[{"ssh": "a", "gpus": true}]', "`gpus` is not a number of GPUs: True"),
        ('{"backend": "jaccl", "hosts": [{"ssh": "a"}, {"ssh": "b"}]}', "`rdma` of a has 0 entries"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ConfigError, match=said):
        parse(text, "hosts.json")


@pytest.mark.parametrize(
    "name",
    ["a", "me@b.local", "me@10.0.0.2", "CORP\\me@b", "me@example.org@b", "ssh://me@b:2222", "[::1]", "fe80::1%en5"],
)
def test_names_of_hosts(name):
    assert from_names(name).hosts[0].ssh == name


def test_an_address_may_name_its_interface():
    assert parse('[{"ssh": "a", "ips": ["fe80::1%en5"]}]', "x").hosts[0].ips == ("fe80::1%en5",)


def test_a_hosts_gpus_reach_the_engine():
    found = parse('[{"ssh": "a", "gpus": 2}, {"ssh": "b"}]', "x")
    assert parse(render(found), "y") == found
    assert [host.gpus for host in found.placed()] == [2, 0]


def test_names_are_hosts_and_addresses_are_kept():
    found = from_names("studio1, me@10.0.0.2")
    assert [host.ssh for host in found.hosts] == ["studio1", "me@10.0.0.2"]
    assert found.placed() == (
        HostConfig(name="studio1", address="studio1", ips=("studio1",)),
        HostConfig(name="me@10.0.0.2", address="10.0.0.2", ips=("10.0.0.2",)),
    )
    with pytest.raises(ConfigError, match="no name"):
        from_names("a,,b")


def test_the_first_hosts_take_their_part_of_the_matrix():
    found = parse(json.dumps(FOUR), "x").first(2)
    assert [host.rdma for host in found.hosts] == [(None, "rdma_en1"), ("rdma_en0", None)]
    check_matrix([list(host.rdma) for host in found.hosts], ["m0", "m1"], "x")
    with pytest.raises(ConfigError, match="--num-ranks 3, but there are 2 hosts"):
        found.first(3)
