"""TLS between hosts: each end accepts exactly the certificates that it means."""

import ssl
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from phalanx.errors import ConfigError
from phalanx.tls.certificates import make_certificate, make_credentials
from phalanx.tls.host_credentials import (
    Credentials,
    accepting,
    connecting,
    place_of,
    read_credentials,
    write_credentials,
)

HOSTS = make_credentials(["one", "two", "a name of far more than the sixty-four characters that X.509 allows for it"])
OTHERS = make_credentials(["one", "two", "three"])
IMPOSTOR = Credentials(key=OTHERS[2].key, place=2, certificates=(*HOSTS[0].certificates[:2], OTHERS[2].certificates[2]))
"""Of another cluster, but knows this one's certificates."""


def shake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after the handshake and one byte each way, so that either has judged the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    done = [False, False]
    for _ in range(6):
        for i, end in enumerate(ends):
            try:
                if not done[i]:
                    end.do_handshake()
                    done[i] = True
            except ssl.SSLWantReadError:
                pass
    assert all(done)
    for sender, receiver in (ends, ends[::-1]):
        sender.write(b"x")
        assert receiver.read(1) == b"x"
    return ends


def test_both_ends_know_each_other() -> None:
    client, server = shake(connecting(HOSTS[2], peer=0), accepting(HOSTS[0], peers=[1, 2]))
    assert place_of(client, HOSTS[2]) == 0
    assert place_of(server, HOSTS[0]) == 2
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("client", "server"),
    [
        pytest.param(connecting(HOSTS[2], peer=1), accepting(HOSTS[0], peers=[2]), id="another host of the cluster"),
        pytest.param(connecting(HOSTS[2], peer=0), accepting(HOSTS[0], peers=[1]), id="a host that may not connect"),
        pytest.param(connecting(OTHERS[2], peer=0), accepting(HOSTS[0], peers=[2]), id="another cluster's server"),
        pytest.param(connecting(IMPOSTOR, peer=0), accepting(HOSTS[0], peers=[1, 2]), id="another cluster's client"),
    ],
)
def test_any_other_certificate_is_refused(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(client, server)


def test_older_versions_of_tls_are_refused() -> None:
    client = connecting(HOSTS[2], peer=0)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake(client, accepting(HOSTS[0], peers=[2]))


def test_a_key_does_not_fit_another_certificate() -> None:
    stolen = Credentials(key=make_certificate("thief").key, place=0, certificates=HOSTS[0].certificates)
    with pytest.raises(ssl.SSLError):
        accepting(stolen, peers=[1])


def test_credentials_come_back_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_bytes(msgspec.json.encode(HOSTS[1]))
    file.chmod(0o600)
    assert read_credentials(file) == HOSTS[1]


def test_credentials_that_others_may_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_bytes(msgspec.json.encode(HOSTS[1]))
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users may read it"):
        read_credentials(file)


KEY, CERTIFICATES = HOSTS[0].key, HOSTS[0].certificates


@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        pytest.param(replace(HOSTS[0], key=KEY[:60] + "A" * 20 + KEY[80:]), "the key", id="key"),
        pytest.param(replace(HOSTS[0], key=""), "the key", id="no key"),
        pytest.param(replace(HOSTS[0], key=HOSTS[1].key), "the key", id="the key of another host"),
        *(
            pytest.param(
                replace(HOSTS[0], certificates=(*CERTIFICATES[:2], other)), "of host 2", id=f"{other[-30:-26]}"
            )
            for other in (CERTIFICATES[2][:100] + "!!!!" + CERTIFICATES[2][104:], CERTIFICATES[2][:200], "é", "")
        ),
    ],
)
def test_damaged_keys_and_certificates_are_named(tmp_path: Path, damaged: Credentials, named: str) -> None:
    write_credentials(tmp_path / "credentials.json", damaged)
    with pytest.raises(ConfigError, match=rf"credentials\.json: .*{named} is damaged"):
        read_credentials(tmp_path / "credentials.json")


@pytest.mark.parametrize("text", ["", "{}", '{"key":"k","place":3,"certificates":["c"]}', "[" * 10_000])
def test_files_without_credentials_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"credentials\.json"):
        read_credentials(file)
    with pytest.raises(ConfigError, match="none"):
        read_credentials(tmp_path / "none")
