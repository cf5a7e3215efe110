"""Describes TLS failures without OpenSSL's file names and constants."""

from __future__ import annotations

import ssl

PREDICATES = {
    "CERTIFICATE_VERIFY_FAILED": "shows a certificate that is not of this group",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "shows no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "does not accept the certificate of this end",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "has received no certificate from this end",
    "HTTP_REQUEST": "sent an HTTP request",
    "WRONG_VERSION_NUMBER": "does not speak TLS",
    "RECORD_LAYER_FAILURE": "does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "does not speak TLS 1.3",
}
"""OpenSSL's reason -> what the other end does, as a predicate."""


def explain(error: OSError) -> str:
    """Why a connection failed, in words; those of OpenSSL without its file names and constants."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not that of the host which is meant"
    if isinstance(error, ssl.SSLError):
        return "TLS: " + (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error) or "it closed the connection"


def predicate_of(error: ssl.SSLError) -> str:
    """The other end's action, as a predicate of a sentence."""
    reason = error.reason or ""
    return PREDICATES.get(reason) or f"broke TLS: {reason.lower().replace('_', ' ') or error}"
