"""Makes the certificates of a cluster's hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from phalanx.tls.host_credentials import Credentials

VALID = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
"""Always: a Raspberry Pi without a battery starts in 1970. Certificates live as long as their cluster runs."""
NAME_CHARS = 64  # X.509's limit for a common name


class Certificate(NamedTuple):
    """A private key and its self-signed certificate, both PEM."""

    key: str
    certificate: str


def make_certificate(name: str, *, addresses: Sequence[str] = ()) -> Certificate:
    """A new key and certificate.

    Args:
        name: of the host; for people only, verification between hosts compares the whole certificate.
        addresses: names and IP addresses by which other clients may ask for the host.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"phalanx {name}"[:NAME_CHARS])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID[0])
        .not_valid_after(VALID[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    if addresses:
        names = x509.SubjectAlternativeName([_general_name(address) for address in dict.fromkeys(addresses)])
        builder = builder.add_extension(names, critical=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return Certificate(private, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode())


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address.encode("idna").decode())


def make_credentials(names: Sequence[str]) -> list[Credentials]:
    """New credentials for every host of a cluster, in the order of their names."""
    made = [make_certificate(name) for name in names]
    certificates = tuple(one.certificate for one in made)
    return [Credentials(key=one.key, place=place, certificates=certificates) for place, one in enumerate(made)]
