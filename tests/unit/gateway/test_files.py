"""Files of replicas and keys: what is read, and what is refused with its line."""

from __future__ import annotations

import os

import pytest

from phalanx.errors import ConfigError
from phalanx.gateway.dispatch.replica_models import parse_aliases
from phalanx.gateway.settings.key_limits import KeyLimits
from phalanx.gateway.settings.keys_file import parse_keys
from phalanx.gateway.settings.replica_addresses import address_fault
from phalanx.gateway.settings.replicas_file import DefaultKeys, ReplicaSpec, parse_replicas, specs_of_urls
from phalanx.gateway.settings.watched_file import WatchedFile

REPLICAS = """
[[replica]]
name = "studio"
url = "http://10.0.0.5:8000/v1/"
weight = 2.0

[[replica]]
name = "mini"
url = "https://mini.local"
max_in_flight = 4
key = "secret"
admin_key = "of its own"
"""
KEYS = """
[[key]]
name = "ci"
key = "0123456789"
requests_per_minute = 60
"""


def test_replicas_of_a_file():
    assert parse_replicas(REPLICAS, "r.toml", keys=DefaultKeys("shared", "admin")) == (
        ReplicaSpec(name="studio", url="http://10.0.0.5:8000", weight=2.0, key="shared", admin_key="admin"),
        ReplicaSpec(name="mini", url="https://mini.local", max_in_flight=4, key="secret", admin_key="of its own"),
    )


def test_keys_of_a_file():
    (key,) = parse_keys(KEYS, "k.toml")
    assert (key.name, key.key, key.limits) == ("ci", "0123456789", KeyLimits(requests_per_minute=60))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weight = 2.0", "wieght = 2.0", "line 5: 'wieght' is not known here. Known are admin_key, key, max_in_flight"),
        ("weight = 2.0", "weight = 0", "line 5: 'weight' has to be at least 0.01."),
        ("weight = 2.0", 'weight = "2"', "line 5: Expected `float`, got `str`"),
        ("max_in_flight = 4", "max_in_flight = 0", "line 10: 'max_in_flight' has to be at least 1."),
        ('name = "mini"', 'name = "studio"', "line 7: there is a replica 'studio' before"),
        ('name = "mini"', 'name = "a b"', "line 7: 'a b' is not a name"),
        ('name = "mini"\n', "", "line 7: Object missing required field `name`"),
        ("https://mini.local", "mini.local", "line 7: 'mini.local' is not the base URL"),
        ("https://mini.local", "http://10.0.0.5:8000", "line 7: http://10.0.0.5:8000 is a replica above"),
        ("https://mini.local", "http://a:b", "is not the base URL"),
        ('key = "secret"', 'key = "a\\nb"', "line 7: The key of mini"),
        ('"of its own"', '"\u00fc"', "line 7: The admin_key of mini"),
        ("[[replica]]\nname = \"mini\"", "[[repilca]]\nname = \"mini\"", "line 7: 'repilca' is not known here"),
        ("weight = 2.0", "weight = ", "line 5"),
        ("weight = 2.0", "weight = " + "[" * 100_000, "r.toml is not TOML"),
        ("max_in_flight = 4", "max_in_flight = " + "9" * 5000, "r.toml is not TOML"),
        ("https://mini.local", "http://[::1", "line 7: 'http://[::1' is not the base URL"),
        ("https://mini.local", "http://a\\nb", "line 7: 'http://a\\nb' is not the base URL"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_refused_with_its_line(old, new, said):
    assert old in REPLICAS
    with pytest.raises(ConfigError) as refused:
        parse_replicas(REPLICAS.replace(old, new), "r.toml")
    assert "r.toml" in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        (KEYS + KEYS, "line 7: there is a key named 'ci' before"),
        (KEYS + KEYS.replace('"ci"', '"x"'), "line 7: the key of 'x' is that of 'ci'"),
        (KEYS.replace("0123456789", "short"), "line 4: 'key' has to have at least 8 characters."),
        (KEYS.replace("60", "0"), "line 5: 'requests_per_minute' has to be at least 1."),
        ("key = 3", "not a list of tables"),
        (KEYS.replace("0123456789", "a long \u00fc"), "line 2: the key of 'ci' is empty, not printable ASCII"),
    ],
)
def test_a_faulty_file_of_keys_is_refused(text, said):
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, "k.toml")
    assert said in str(refused.value)


def test_urls_name_replicas_by_host_and_port():
    specs = specs_of_urls(["http://a:8000/v1,http://b:1/", "https://c"], keys=DefaultKeys("k"))
    assert [(spec.name, spec.url) for spec in specs] == [
        ("a:8000", "http://a:8000"), ("b:1", "http://b:1"), ("c", "https://c")
    ]  # fmt: skip
    for bad in (
        "a:8000",
        "ftp://a",
        "http://u:p@a",
        "http://a:99999",
        "http://a?x=1",
        "http://a,http://a/v1",
        "http://[::1",
        "http://a b",
    ):
        with pytest.raises(ConfigError):
            specs_of_urls([bad])


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "2002:a9fe:a9fe::", "fe80::1", "fe80::1%eth0",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "64:ff9b::a9fe:a9fe%1", "::169.254.169.254",
        "fd00:ec2::254", "fd00:0ec2::0254%2", "100.100.100.200", "::ffff:100.100.100.200", "168.63.129.16", "0.0.0.0",
        "::", "::ffff:0.0.0.0", "2852039166", "0251.0376.0251.0376", "",
    ],
)  # fmt: skip
def test_addresses_that_no_replica_of_the_admin_api_has(address):
    assert address_fault(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.0.0.5",
        "192.168.1.2",
        "::ffff:10.0.0.5",
        "100.100.100.201",
        "fd00::1",
        "2001:db8::1",
        "64:ff9b::a00:5",
    ],
)
def test_addresses_that_one_may_have(address):
    assert not address_fault(address)


def test_a_file_and_flags_may_name_any_address():
    assert [spec.url for spec in specs_of_urls(["http://169.254.7.1:8000"])] == ["http://169.254.7.1:8000"]
    (spec, _) = parse_replicas(REPLICAS.replace("10.0.0.5", "169.254.7.1"), "r.toml")
    assert spec.url == "http://169.254.7.1:8000" and not spec.by_api


def test_aliases():
    assert parse_aliases(["gpt-4o=m", "x = y"]) == {"gpt-4o": "m", "x": "y"}
    for bad in (["a"], ["=b"], ["a="], ["a=b", "a=c"], ["a=b", "b=c"]):
        with pytest.raises(ConfigError):
            parse_aliases(bad)


def test_a_file_is_read_again_when_it_changes_and_a_faulty_one_changes_nothing(tmp_path, caplog):
    path, used = tmp_path / "r.toml", []
    file = WatchedFile(path, "--replicas", parse_replicas, used.append)
    with pytest.raises(ConfigError, match=r"--replicas .* cannot be read"):
        file.load()
    path.write_text(REPLICAS)
    file.load()
    assert [spec.name for spec in used[-1]] == ["studio", "mini"]

    def write(text: str, at: int) -> None:
        path.write_text(text)
        os.utime(path, (at, at))

    write(REPLICAS.replace("weight", "wieght"), 1)
    file.reload(if_changed=True)
    assert len(used) == 1 and "line 5: 'wieght'" in caplog.text
    write(REPLICAS.replace("mini", "maxi"), 2)
    file.reload(if_changed=True)
    assert [spec.name for spec in used[-1]] == ["studio", "maxi"]
    file.reload(if_changed=True)
    file.reload(if_changed=False)
    assert len(used) == 2
    path.unlink()
    file.reload(if_changed=True)
    assert len(used) == 2
