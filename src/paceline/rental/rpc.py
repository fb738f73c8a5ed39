"""One gRPC call as a value, and what carries it: so that a test can, without a socket."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """One call as it goes out."""

    service: str
    method: str
    content: bytes
    metadata: Sequence[tuple[str, str]] = field(repr=False)
    """May hold a token."""
    timeout_s: float


class RpcFailedError(Exception):
    """A call that was answered with a status, or not at all."""

    def __init__(self, code: str, text: str, status: bytes | None = None) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        """Name of the gRPC status."""
        self.text = text
        self.status = status
        """google.rpc.Status, where it came along."""


class Wire(Protocol):
    """What carries calls."""

    def __call__(self, call: RpcCall) -> bytes:
        """Return the answer. Raises RpcFailedError."""
        ...
