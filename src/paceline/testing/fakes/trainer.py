"""A trainer without a model: it publishes states of some tensors through a real control plane."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.refit.control.protocol import ControlPlane
from paceline.refit.digest import root_digest
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import (
    Shard,
    TensorBuffer,
    VersionDescription,
    VersionRequest,
    WeightVersion,
    WeightVersionShardManifest,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.trainers.protocol import WeightVersionShardManifestPublisher
from paceline.refit.transports.protocol import ObjectServer
from paceline.testing.payloads import CHUNK_BYTES, delta_payload, full_payload, tensor_entry

State = Mapping[str, TensorBuffer]


class _Server(ObjectServer, WeightVersionShardManifestPublisher, Protocol):
    """Serves objects and manifests."""


class FakeTrainer:
    """Publishes full versions and deltas, one after another."""

    def __init__(
        self,
        control: ControlPlane,
        server: _Server,
        *,
        model_name: str = "m",
        run_id: str = "r",
        aliases: Sequence[tuple[str, str]] = (),
        chunk_bytes: int | None = CHUNK_BYTES,
    ) -> None:
        """Take the services; chunks of None are as large as a trainer's."""
        self._control = control
        self._server = server
        self._model_name = model_name
        self._run_id = run_id
        self.aliases = aliases
        self._chunk_bytes = chunk_bytes
        self._worker_id = "trainer"
        self.beat()

    def beat(self) -> None:
        """Register or refresh the trainer."""
        self._control.register_worker(
            WorkerRegistration(
                worker_id=self._worker_id, role=WorkerRole.TRAINER, model_name=self._model_name
            ),
            ttl_seconds=3600,
        )

    def publish_full(self, uid: str, sequence: int, state: State) -> WeightVersion:
        """Publish a state whole."""
        manifest, data = full_payload(
            state.values(), aliases=self.aliases, chunk_bytes=self._chunk_bytes
        )
        return self.publish(uid, sequence, manifest, data, parent_root=None)

    def publish_delta(
        self, uid: str, sequence: int, base: State, state: State, *, base_uid: str
    ) -> WeightVersion:
        """Publish a state as the change since another."""
        manifest, data = self.encode_delta(base, state)
        return self.publish(
            uid, sequence, manifest, data, parent_root=manifest.base_root, base_uid=base_uid
        )

    def encode_delta(self, base: State, state: State) -> tuple[Manifest, bytes]:
        """Return the change between two states, to be published later."""
        return delta_payload(base, state, aliases=self.aliases, chunk_bytes=self._chunk_bytes)

    def publish(
        self,
        uid: str,
        sequence: int,
        manifest: Manifest,
        data: bytes,
        *,
        parent_root: str | None,
        base_uid: str | None = None,
    ) -> WeightVersion:
        """Publish a manifest and its one object, right or wrong."""
        self._create(uid, [manifest], base_uid=base_uid)
        return self._bring(uid, sequence, manifest, data, parent_root=parent_root)

    def publish_slots(
        self,
        uid: str,
        sequence: int,
        slots: Sequence[tuple[Manifest, bytes]],
        *,
        base_uid: str | None = None,
    ) -> WeightVersion:
        """Publish a version of several slots, as as many processes do."""
        self._create(uid, [manifest for manifest, _ in slots], base_uid=base_uid)
        found = [
            self._bring(uid, sequence, manifest, data, parent_root=manifest.base_root)
            for manifest, data in slots
        ]
        return found[-1]

    def _create(self, uid: str, manifests: Sequence[Manifest], *, base_uid: str | None) -> None:
        request = VersionRequest(
            model_name=self._model_name,
            idempotency_key=uid,
            uid=uid,
            payload_format=manifests[0].payload_format,
            base_version_id=base_uid,
            expected_source_slots=tuple(manifest.source_slot_id for manifest in manifests),
        )
        self._control.create_version(request)

    def _bring(
        self, uid: str, sequence: int, manifest: Manifest, data: bytes, *, parent_root: str | None
    ) -> WeightVersion:
        """Describe one slot, serve its object, and tell of it."""
        said = VersionDescription(
            run_id=self._run_id,
            sequence=sequence,
            step=sequence,
            root_digest=manifest.root_digest,
            parent_root=parent_root,
            payload_bytes=len(data),
            full_bytes=sum(entry.num_bytes for entry in manifest.tensors),
            changed_elements=0,
            total_elements=1,
        )
        self._control.describe_version(uid, said, source_slot_id=manifest.source_slot_id)
        for item in manifest.objects:
            self._server.serve_object(item.object_id, [memoryview(data)])
        rendered = WeightVersionShardManifest(
            data=render_manifest(manifest),
            tensor_count=len(manifest.tensors),
            total_bytes=len(data),
            transport=self._server.transport,
        )
        address = self._server.publish_manifest(
            version_id=uid, source_slot_id=manifest.source_slot_id, manifest=rendered
        )
        return self._control.create_shard(
            Shard(
                version_id=uid,
                source_slot_id=manifest.source_slot_id,
                worker_id=self._worker_id,
                tensor_count=rendered.tensor_count,
                total_bytes=rendered.total_bytes,
                manifest_digest=rendered.digest,
                manifest_endpoint=address,
            )
        )


def bytes_of(state: State) -> dict[str, bytes]:
    """Return a state's bytes by name, to compare with what an engine has."""
    return {name: bytes(buffer.data) for name, buffer in state.items()}


def root_of(state: State) -> str:
    """Return a state's root digest."""
    return root_digest(map(tensor_entry, state.values()))
