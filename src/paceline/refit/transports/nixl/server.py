"""Staged buffers registered with NIXL, and a door where readers ask where they lie."""

import threading
from collections.abc import Sequence

from paceline.refit.errors import PublishError
from paceline.refit.model import WeightVersionShardManifest
from paceline.refit.transports.nixl.agent import NixlAgent, Region, region_of
from paceline.refit.transports.nixl.table import Stretch, Table, render_table
from paceline.refit.transports.protocol import ManifestDoor

PREFIX = "nixl+"
TABLES = "nixl-table"
"""The door's word for tables, where manifests have the id of their version."""


class NixlObjectServer:
    """Signs ObjectServer and the publisher's port.

    Readers read memory one-sidedly: the process does nothing for them, and does not see them. What
    keeps a buffer still is the lease; a reader that reads on without one finds out by the hash.
    """

    def __init__(self, agent: NixlAgent, door: ManifestDoor) -> None:
        """Serve through ``agent``.

        Args:
            agent: stays the caller's.
            door: serves tables and manifests to whoever has the token; closed with the server.
        """
        self._agent = agent
        self._door = door
        self._regions: dict[str, tuple[Sequence[Region], object]] = {}
        self._lock = threading.Lock()

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "nixl"

    @property
    def endpoint(self) -> str:
        """The door's, with a scheme of ours."""
        return PREFIX + self._door.endpoint

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Register the buffers and publish where they lie."""
        regions = [region_of(part.cast("B")) for part in parts if part.nbytes]
        self.serve_regions(object_id, regions, owner=tuple(parts))

    def serve_regions(
        self, object_id: str, regions: Sequence[Region], *, owner: object = None
    ) -> None:
        """Serve memory of any kind, a device's too; ``owner`` is kept until it is withdrawn.

        Raises:
            PublishError: NIXL cannot register it; nothing is left behind.
        """
        with self._lock:
            if object_id in self._regions:
                return
            self._agent.register(regions)
            try:
                table = Table(
                    agent_name=self._agent.agent_name,
                    agent_metadata=self._agent.metadata_of(regions),
                    stretches=tuple(
                        Stretch(
                            address=each.address,
                            size=each.size,
                            memory=each.memory,
                            device=each.device,
                        )
                        for each in regions
                    ),
                )
                document = WeightVersionShardManifest(
                    data=render_table(table),
                    tensor_count=1,
                    total_bytes=max(1, table.num_bytes),
                    transport="NIXL",
                )
                self._door.publish_manifest(
                    version_id=TABLES, source_slot_id=object_id, manifest=document
                )
            except BaseException:
                self._agent.deregister(regions)
                raise
            self._regions[object_id] = (regions, owner)

    def withdraw_object(self, object_id: str) -> None:
        """Forget where it lies and deregister it; idempotent. Only when no lease lives."""
        with self._lock:
            self._door.release_manifest(version_id=TABLES, source_slot_id=object_id)
            found = self._regions.pop(object_id, None)
            if found is not None:
                self._agent.deregister(found[0])

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Serve a manifest at the door and return its address. Raises PublishError."""
        if version_id == TABLES:
            raise PublishError(f"no version can be called {TABLES}")
        address = self._door.publish_manifest(
            version_id=version_id, source_slot_id=source_slot_id, manifest=manifest
        )
        return PREFIX + address

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Stop serving it; idempotent."""
        self._door.release_manifest(version_id=version_id, source_slot_id=source_slot_id)

    def close(self) -> None:
        """Close the door and deregister everything; idempotent."""
        self._door.close()
        with self._lock:
            for regions, _ in self._regions.values():
                self._agent.deregister(regions)
            self._regions.clear()
