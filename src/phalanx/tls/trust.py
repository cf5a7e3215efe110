"""Contexts for clients of a server whose certificate they have as a file."""

from __future__ import annotations

import ssl
from pathlib import Path

END = "-----END CERTIFICATE-----"


def trust_only(certificate: Path) -> ssl.SSLContext:
    """A client's context that accepts exactly one certificate, under whatever name the server is reached.

    Args:
        certificate: PEM file; its first certificate counts, which in a server's file is the server's own.

    Raises:
        OSError: the file cannot be read, or holds no certificate (ssl.SSLError among them).
    """
    text = certificate.read_text(errors="replace")  # a certificate in PEM is ASCII
    if END not in text:
        raise OSError("no certificate is in it")
    context = ssl.create_default_context(cadata=text[: text.index(END) + len(END)])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever signed it
    context.check_hostname = False  # no other server has its key
    return context
