"""``host:port`` as text: taken apart, and judged for whether it leaves this computer."""

import ipaddress
from typing import Final

from paceline.core.errors import PreflightError, UsageError

PORT_MAX: Final = 65535
LOOPBACK: Final = "127.0.0.1"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        raise UsageError(f"{address!r} is no address; write host:port, for example 127.0.0.1:8001")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets where the host needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def told_as(host: str) -> str:
    """Return what others are told of a server that listens on ``host``.

    On every address is no place to dial. Where such a server is reached under other names, there is
    a tunnel from loopback or a route to it.
    """
    return LOOPBACK if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound


def require_loopback(address: str, *, why: str) -> None:
    """Raise PreflightError unless ``address`` stays on this computer; UsageError if it is none."""
    if not is_loopback(split_address(address)[0]):
        raise PreflightError(
            f"{address} is reached from other machines and {why} in plain text; use a loopback "
            f"address behind a TLS or SSH tunnel, or allow plain text explicitly"
        )


def is_loopback(host: str) -> bool:
    """Return whether packets to ``host`` stay on this computer; of names, only localhost does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
