"""TLS between the hosts of one cluster: each end accepts exactly one certificate, that of the host it expects.

Instead of an authority, every host has a self-signed certificate and the certificates of all others
(`certificates.py` makes them).
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.errors import ConfigError
from phalanx.private_files import write_private


class Credentials(Struct, frozen=True, kw_only=True):
    """One host's key and all hosts' certificates. Texts are PEM."""

    key: str
    """The host's private key, which stays on it."""
    place: int
    """The host's place in `certificates`."""
    certificates: tuple[str, ...]
    """The certificates of all hosts of the cluster, in the order of the hosts."""


def write_credentials(file: Path, credentials: Credentials) -> None:
    """Write a new file that only its owner may read.

    Raises:
        OSError: a file, or a link, has this name already.
    """
    write_private(file, msgspec.json.encode(credentials))


def read_credentials(file: Path) -> Credentials:
    """The credentials in a file that `write_credentials` wrote.

    Raises:
        ConfigError: the file cannot be read, or others may read it.
    """
    remedy = "`phalanx up` writes it anew for every cluster; for units, `phalanx credentials` does."
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"{file} holds a private key, and other users may read it.", remedy=f"chmod 600 {file}")
        credentials = msgspec.json.decode(file.read_bytes(), type=Credentials)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} holds no credentials: {error}.", remedy=remedy) from error
    if not 0 <= credentials.place < len(credentials.certificates):
        raise ConfigError(f"{file}: place {credentials.place} has no certificate.", remedy=remedy)
    try:
        for place, certificate in enumerate(credentials.certificates):
            what = f"the certificate of host {place}"
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate.encode("ascii").decode())
        what = "the key"
        _context(ssl.PROTOCOL_TLS_SERVER, credentials, [])
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{file}: {what} is damaged ({error}).", remedy=remedy) from error
    return credentials


def accepting(credentials: Credentials, *, peers: Sequence[int]) -> ssl.SSLContext:
    """The context of an end that accepts connections from the hosts with these places, and from no others."""
    return _context(ssl.PROTOCOL_TLS_SERVER, credentials, peers)


def connecting(credentials: Credentials, *, peer: int) -> ssl.SSLContext:
    """The context of an end that connects to the host with this place, and to no other."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials, [peer])


def place_of(peer: ssl.SSLObject | ssl.SSLSocket, credentials: Credentials) -> int | None:
    """The place of the host at the other end, once the handshake is over; None if its certificate is not known."""
    shown = peer.getpeercert(binary_form=True)
    for place, certificate in enumerate(credentials.certificates):
        if shown is not None and ssl.PEM_cert_to_DER_cert(certificate) == shown:
            return place
    return None


def _context(protocol: int, credentials: Credentials, peers: Sequence[int]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is expected, not a name in it
    context.verify_mode = ssl.CERT_REQUIRED
    for place in peers:
        context.load_verify_locations(cadata=credentials.certificates[place])
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are not resumed
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # mode 0600; OpenSSL reads keys from files only
        file.write(credentials.certificates[credentials.place] + credentials.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
