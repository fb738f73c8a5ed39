"""What a transport signs: serve immutable objects, read ranges of them into our buffers.

An object is one immutable byte string with an id that is a digest of its content. Which bytes
of which object are needed is the plan's business; a transport only moves them. It verifies
nothing beyond lengths: the receiver checks hashes, whoever the source was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """Bytes ``offset`` (inclusive) to ``offset + size`` (exclusive) of one object."""

    object_id: str
    offset: int
    size: int


class ObjectServer(Protocol):
    """The source side; lives in the process that owns the bytes. Safe from several threads."""

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        ...

    @property
    def endpoint(self) -> str:
        """Where readers reach this server, e.g. ``http://10.0.0.5:40123``."""
        ...

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Make the concatenation of ``parts`` readable, without copying it.

        The buffers must not change or go away until ``withdraw_object`` returned. Idempotent
        for the same id.
        """
        ...

    def withdraw_object(self, object_id: str) -> None:
        """Stop serving; returns when no reader is inside the buffers. Idempotent."""
        ...

    def close(self) -> None:
        """Stop the server; idempotent."""
        ...


class ObjectReader(Protocol):
    """The reading side of one transport."""

    def read_object(
        self, endpoint: str, wanted: ObjectRange, target: memoryview, *, timeout_s: float
    ) -> None:
        """Fill ``target`` (exactly ``wanted.size`` bytes) from the source at ``endpoint``.

        Raises:
            FetchError: the source is gone, does not have the object, sent too little or too
                much, or ``timeout_s`` passed. ``target`` may then hold anything.
        """
        ...

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an advertised address. Raises FetchError."""
        ...

    def source_endpoint(self, address: str) -> str:
        """Return the ``endpoint`` of the object server behind a manifest address; no I/O."""
        ...

    def close(self) -> None:
        """Give connections back; idempotent."""
        ...
