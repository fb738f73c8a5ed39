"""The reference transport: real bytes between threads of one process, no sockets."""

import threading
from collections.abc import Sequence
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError
from paceline.refit.model import ObjectRange, WeightVersionShardManifest
from paceline.refit.staging.shelf import ManifestShelf, ObjectShelf
from paceline.refit.transports.partwise import PartwiseRead
from paceline.refit.transports.protocol import Part, ReadPlan

_PATIENCE_S = 5.0
_servers: WeakValueDictionary[str, "MemoryObjectServer"] = WeakValueDictionary()
"""By endpoint: the wire of this transport."""
_servers_lock = threading.Lock()


class MemoryObjectServer:
    """Serves objects and manifests to readers in the same process."""

    def __init__(self) -> None:
        self._objects = ObjectShelf()
        self._manifests = ManifestShelf()
        self._is_open = True
        with _servers_lock:
            self._endpoint = f"memory://{id(self):x}"
            _servers[self._endpoint] = self

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "memory"

    @property
    def endpoint(self) -> str:
        """Where readers find this server."""
        return self._endpoint

    @property
    def num_readers(self) -> int:
        """How many reads of objects it answers now."""
        return self._objects.num_readers

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Make an object readable, without copying it."""
        self._objects.put(object_id, parts)

    def replace_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Serve the same bytes from other memory; returns when nobody reads the old one."""
        self._objects.replace(object_id, parts, patience_s=_PATIENCE_S)

    def withdraw_object(self, object_id: str) -> None:
        """Stop serving; returns when no reader is inside."""
        self._objects.withdraw(object_id, patience_s=_PATIENCE_S)

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Serve a manifest and return its address."""
        self._manifests.put((version_id, source_slot_id), manifest)
        return f"{self._endpoint}/{quote(version_id, safe='')}/{quote(source_slot_id, safe='')}"

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Stop serving it; idempotent."""
        self._manifests.remove((version_id, source_slot_id))

    def close(self) -> None:
        """Refuse readers from now on; idempotent."""
        self._is_open = False

    def copy_range(self, wanted: ObjectRange, target: memoryview) -> None:
        """Copy a range for a reader. Raises FetchError."""
        with self._objects.reading(wanted.object_id) as held:
            if held is None or not self._is_open:
                raise _refusal(self._endpoint, wanted, "it is not served here any more")
            if wanted.offset + wanted.size > held.num_bytes:
                raise _refusal(self._endpoint, wanted, f"it has {held.num_bytes} bytes only")
            filled = 0
            for piece in held.pieces(wanted.offset, wanted.size):
                target[filled : filled + len(piece)] = piece
                filled += len(piece)

    def find_manifest(self, key: tuple[str, str]) -> bytes:
        """Return a manifest for a reader. Raises FetchError."""
        found = self._manifests.get(key) if self._is_open else None
        if found is None:
            raise FetchError(f"manifest of {key[0]} is not served here any more")
        return found.data


class MemoryObjectReader:
    """Reads from any MemoryObjectServer of this process."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        """Set up; without a clock the records say that no time passed."""
        self._clock = clock or _Timeless()

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "memory"

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Plan without I/O."""

        def read(part: Part, left_s: float) -> int:
            server = _server(endpoint, part.wanted)
            server.copy_range(part.wanted, part.target)
            return 0

        return PartwiseRead(
            read, transport="memory", source=endpoint, parts=parts, clock=self._clock
        )

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return a manifest. Raises FetchError."""
        _, _, path = address.removeprefix("memory://").partition("/")
        version_id, _, source_slot_id = path.partition("/")
        key = (unquote(version_id), unquote(source_slot_id))
        data = _server(self.source_endpoint(address)).find_manifest(key)
        if len(data) > size_max:
            raise FetchError(f"manifest of {version_id} has {len(data)} bytes, over {size_max}")
        return data

    def source_endpoint(self, address: str) -> str:
        """Return the server's endpoint behind a manifest address."""
        return "memory://" + address.removeprefix("memory://").partition("/")[0]

    def close(self) -> None:
        """Nothing to give back."""


class _Timeless:
    """A clock of a place where nothing takes time."""

    def time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Return at once."""


def _refusal(endpoint: str, wanted: ObjectRange, why: str) -> FetchError:
    return FetchError(f"{wanted} at {endpoint}: {why}", source=endpoint, wanted=wanted)


def _server(endpoint: str, wanted: ObjectRange | None = None) -> MemoryObjectServer:
    with _servers_lock:
        found = _servers.get(endpoint)
    if found is None:
        raise FetchError(f"nobody serves at {endpoint}", source=endpoint, wanted=wanted)
    return found
