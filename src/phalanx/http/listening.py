"""Listening sockets of HTTP servers: their address, their URL and their certificate."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl

from phalanx.errors import ConfigError

BACKLOG = 2048  # connections that wait in the kernel: a thousand streams may begin at once


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of the API: one that other machines reach, if they can reach it at all."""
    scheme = "https" if tls else "http"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{port}/v1"
    if address.is_unspecified:
        return f"{scheme}://{own_address()}:{port}/v1"
    return f"{scheme}://[{host}]:{port}/v1" if address.version == 6 else f"{scheme}://{host}:{port}/v1"


def own_address() -> str:
    """This machine's IPv4 address in the network of its default route; 127.0.0.1 without one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that no machine has (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """The server's certificate and key; None for plain HTTP.

    Raises:
        ConfigError: names the flag and what is wrong.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile without a certificate.", remedy="Give --ssl-certfile as well.")
        return None
    try:
        no_password = ""  # else OpenSSL asks for one on the terminal
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile, lambda: no_password)
        return context
    except OSError as error:  # ssl.SSLError among them
        files = f"--ssl-certfile {certfile}"
        files += f" and --ssl-keyfile {keyfile}" if keyfile else " (certificate and key)"
        raise ConfigError(
            f"{files} cannot be used: {error.strerror or error}.",
            remedy="Both are PEM files, the key without a password, and made for each other."
            + ("" if keyfile else " A key in a file of its own goes with --ssl-keyfile."),
        ) from error


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound and listening TCP socket; `port` 0 takes a free one.

    Args:
        flag: that sets the port, for errors.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # asyncio sets TCP_NODELAY only on sockets of protocol TCP; without it every chunk may wait 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address: {error.strerror}.", remedy=_host_remedy(host)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--host {host} is not an address of this machine.",
                remedy="Use 0.0.0.0 for all addresses of this machine, or one that `ip address` or `ifconfig` shows.",
            ) from error
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}.",
            remedy=f"Choose another {flag} (0 picks a free one), or stop what uses it "
            f"(`ss -ltnp 'sport = :{port}'` or `lsof -i :{port}` shows what).",
        ) from error
    listener.setblocking(False)
    return listener


def _host_remedy(host: str) -> str:
    """The remedy for a host that has no address: perhaps a URL, or a port behind it."""
    bare = host.partition("://")[2].partition("/")[0] or host
    name, _, port = bare.rpartition(":")
    if name and port.isdecimal():
        return f"Use --host {name} --port {port}."
    return "Use 127.0.0.1 or 0.0.0.0." if bare == host else f"Use --host {bare}."
