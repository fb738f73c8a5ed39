"""Manifests at any address, for whoever looks at versions and moves none of their bytes."""

from collections.abc import Callable
from dataclasses import replace

from paceline.refit.compose.data import DataPlane, is_bucket, open_reader
from paceline.refit.errors import FetchError
from paceline.refit.transports.address import MANIFESTS, split_addresses
from paceline.refit.transports.protocol import ObjectReader

_NIXL = "nixl+"


class ManifestReader:
    """Reads through HTTP and buckets; a NIXL source's door is HTTP too, so no agent is needed."""

    def __init__(self, plane: DataPlane, *, token: Callable[[], str]) -> None:
        """Set up without I/O; credentials of buckets come from their providers' environment."""
        self._plane = plane
        self._token = token
        self._readers: dict[str, ObjectReader] = {}

    def read(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return what every way of an address gives.

        Raises:
            FetchError: one of them does not answer, or two of them give different bytes.
            MissingExtraError: a bucket's library is not installed.
        """
        found: set[bytes] = set()
        for single in split_addresses(address):
            place = single.removeprefix(_NIXL)
            reader = self._reader(place)
            found.add(reader.read_manifest(place, size_max=size_max, timeout_s=timeout_s))
        if len(found) != 1:
            raise FetchError(f"{address} gives {len(found)} different manifests")
        return found.pop()

    def close(self) -> None:
        """Give connections back; idempotent."""
        for reader in self._readers.values():
            reader.close()

    def _reader(self, address: str) -> ObjectReader:
        bucket = address.partition(MANIFESTS)[0] if is_bucket(address) else ""
        if bucket not in self._readers:
            plane = self._plane
            if bucket:
                plane = replace(plane, transports=("objectstore",), bucket=bucket)
            self._readers[bucket] = open_reader(plane, token=self._token, name="verify")
        return self._readers[bucket]
