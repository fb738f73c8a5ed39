"""Versions for receivers that are not ours: the canonical format, in a bucket.

Stage -> create -> shard, then the index that names it -> READY. The first version of a run, and
every ``anchor_every``-th, is a full checkpoint; the others are deltas to the version before.
Nothing is leased there and nothing deleted: what goes and when is for the bucket's own rules.
"""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.delta import canonical
from paceline.refit.delta.canonical import CanonicalTensor, FullTensor
from paceline.refit.delta.order import as_words, kind_of
from paceline.refit.errors import (
    ControlError,
    ControlUnavailableError,
    VersionSkippedError,
)
from paceline.refit.model import (
    ObjectStorageSource,
    ObjectStorageType,
    StagedWeightVersionShardData,
    TrainerStagingMode,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
)
from paceline.refit.publisher.capturing import Capturer
from paceline.refit.publisher.in_place import HasStepHook
from paceline.refit.publisher.line import (
    Job,
    Line,
    Outcome,
    Publication,
)
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.values import (
    Notify,
    PublishedVersion,
    PublisherOptions,
    sequence_of,
    version_uid,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsChain, TrainerEngineAdapter

log = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
SHARD_BYTES_MAX: Final = 2**32
_T = TypeVar("_T")


class NewKeys(Protocol):
    """A prefix of a bucket whose keys are each written once."""

    url: str

    def put_new(self, key: str, parts: Sequence[memoryview]) -> None:
        """Write a key, or find the same bytes there. Raises PublishError."""
        ...


class CanonicalPublisher:
    """Publishes one trainer process's weights for stock receivers; shaped like Publisher."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        trainer: TrainerEngineAdapter,
        bucket: NewKeys,
        clock: Clock,
        options: PublisherOptions,
        notify: Notify = lambda name, fields: None,
    ) -> None:
        """Set up without I/O; two arenas of the trainer are held.

        Raises:
            TypeError: the trainer cannot release what it staged.
        """
        if not isinstance(trainer, SupportsChain):
            raise TypeError("the trainer adapter must sign SupportsChain")
        self._control = control
        self._trainer = trainer
        self._chain: SupportsChain = trainer
        self._bucket = bucket
        self._clock = clock
        self._options = options
        self._notify = notify
        self._line = Line.telling(notify)
        self._capturer = Capturer(
            trainer=trainer,
            line=self._line,
            shelf=None,
            clock=clock,
            options=replace(
                options,
                staging_mode=TrainerStagingMode.COPY_TO_HOST,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
            ),
        )
        self._next_sequence: int | None = None
        self._base: tuple[StagedWeightVersionShardData, VersionDescription, str] | None = None
        self._since_full = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None:
            self._line.raise_unseen()

    def start(self) -> None:
        """Find out which sequences this run has used. Raises ControlError, PublishError."""
        self._line.require_new()
        found = self._persist(lambda: self._control.list_versions(self._options.model_name))
        used = (sequence_of(version.uid, self._options.run_id) for version in found)
        self._next_sequence = 1 + max(used, default=-1)
        self._line.start()

    def publish(self, *, step: int) -> Publication:
        """Publish the weights as they are now; see ``Publisher.publish``.

        Raises:
            StagingError: the bytes cannot be kept still now.
            PublishError, ControlError: an earlier publication failed and nobody asked about it.
        """
        with self._line.turn():
            return self._publish_next(step=operator.index(step))

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything captured so far is out; see ``Publisher.flush``."""
        is_out = self._line.wait_idle(timeout_s)
        self._line.raise_unseen()
        return is_out

    def protect(self, optimizer: HasStepHook) -> None:
        """Do nothing: what is published was copied."""

    def before_step(self) -> None:
        """Return at once: what is published was copied."""

    def wait_installed(self, *, timeout_s: float) -> bool:
        """Return False at once: stock receivers do not say what they serve."""
        return False

    def close(self) -> None:
        """Finish what was captured and give the arenas back; what is in the bucket stays.

        Idempotent. Raises what ``Publisher.close`` does.
        """
        self._close()
        self._line.raise_unseen()

    def _close(self) -> None:
        if self._next_sequence is None:
            return
        self._line.close(self._options.close_wait_s)
        if self._base is not None:
            self._chain.release_staged(self._base[0])
        self._base = self._next_sequence = None

    def _publish_next(self, *, step: int) -> Publication:
        assert self._next_sequence is not None  # noqa: S101 - started, or it is no turn
        started = self._clock.monotonic()
        sequence = self._next_sequence
        self._next_sequence += 1
        publication = Publication(
            version_id=version_uid(self._options.run_id, sequence),
            sequence=sequence,
            step=step,
            wait_s=self._options.publish_wait_s,
        )
        try:
            captured = self._capturer.capture(needs_full=lambda: True)
        except VersionSkippedError as exc:
            self._line.leave_out(publication, exc)
            return publication
        self._line.hand_over(
            Job(
                publication=publication,
                work=lambda: self._publish(publication, captured, started),
                give_back=lambda: self._capturer.give_back(captured),
            )
        )
        return publication

    def _publish(self, publication: Publication, captured: object, started: float) -> Outcome:
        staged = self._capturer.stage(captured, WeightPayloadFormat.FULL_TENSOR)
        try:
            published = self._bring_out(
                staged, sequence=publication.sequence, step=publication.step, started=started
            )
        except BaseException:
            self._chain.discard_staged(staged)
            raise
        self._notify("version.published", published.to_fields())
        return Outcome(version=published, then=(self._capturer.prepare,))

    def _bring_out(
        self, staged: StagedWeightVersionShardData, *, sequence: int, step: int, started: float
    ) -> PublishedVersion:
        uid = version_uid(self._options.run_id, sequence)
        new = tensors_of(staged)
        is_full = self._base is None or self._since_full + 1 >= self._options.anchor_every
        base = None if is_full else self._base
        files = (
            full_files(new)
            if base is None
            else delta_files(tensors_of(base[0]), new, version=uid, base_version=base[2])
        )
        parent = None if self._base is None else self._base[1].root_digest
        self._create(uid, base_uid=None if base is None else base[2])
        try:
            sizes = [self._put(f"{uid}/{name}", data) for name, data in files]
            said = self._description(
                staged,
                sequence=sequence,
                step=step,
                parent_root=parent,
                payload_bytes=sum(sizes),
                changed_elements=changed_elements(base and tensors_of(base[0]), new),
            )
            self._persist(lambda: self._control.describe_version(uid, said))
            self._persist(lambda: self._control.update_version_state(uid, VersionState.READY))
        except BaseException as exc:
            self._take_back(uid, exc)
            raise
        if self._base is not None:
            self._chain.release_staged(self._base[0])
        self._base = (staged, said, uid)
        self._since_full = 0 if base is None else self._since_full + 1
        return PublishedVersion(
            version_id=uid,
            sequence=sequence,
            step=step,
            root_digest=said.root_digest,
            payload_format=_format_of(is_full=base is None),
            payload_bytes=said.payload_bytes,
            full_bytes=said.full_bytes,
            changed_elements=said.changed_elements,
            total_elements=said.total_elements,
            publish_ms=1000 * (self._clock.monotonic() - started),
        )

    def _create(self, uid: str, *, base_uid: str | None) -> None:
        request = VersionRequest(
            model_name=self._options.model_name,
            idempotency_key=uid,
            payload_format=_format_of(is_full=base_uid is None),
            base_version_id=base_uid,
            object_storage=ObjectStorageSource(
                uri=f"{self._bucket.url}/{uid}/{INDEX}", storage_type=ObjectStorageType.S3
            ),
            uid=uid,
        )
        self._persist(lambda: self._control.create_version(request))

    def _take_back(self, uid: str, cause: BaseException) -> None:
        """Retire a version that did not come out; its keys are never used again.

        If READY was said and the reply lost, somebody may have it as a base: a full one follows.
        """
        self._since_full = self._options.anchor_every
        if isinstance(cause, ControlUnavailableError):
            return
        try:
            self._control.delete_version(uid)
        except ControlError as exc:
            log.warning("version %s did not come out and could not be retired: %s", uid, exc)

    def _put(self, key: str, data: bytes) -> int:
        self._bucket.put_new(key, [memoryview(data)])
        return len(data)

    def _description(self, staged: StagedWeightVersionShardData, **more: Any) -> VersionDescription:
        buffers = _buffers(staged)
        return VersionDescription(
            run_id=self._options.run_id,
            root_digest=buffers.manifest.root_digest,
            full_bytes=buffers.full_bytes,
            total_elements=buffers.total_elements,
            **more,
        )

    def _persist(self, call: Callable[[], _T]) -> _T:
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)


def tensors_of(staged: StagedWeightVersionShardData) -> Mapping[str, FullTensor]:
    """Return the tensors of a staged full version, as views of its one buffer."""
    buffers = _buffers(staged)
    (whole,) = buffers.objects[0].parts
    entries = {entry.name: entry for entry in buffers.manifest.tensors}
    return {
        segment.tensor: FullTensor(
            dtype=entries[segment.tensor].dtype,
            shape=entries[segment.tensor].shape,
            data=whole[segment.offset : segment.offset + segment.num_bytes],
        )
        for segment in buffers.manifest.segments
    }


def changed_elements(base: Mapping[str, FullTensor] | None, new: Mapping[str, FullTensor]) -> int:
    """Return how many elements have other bits than in ``base``; without one all are new."""
    if base is None:
        return sum(math.prod(item.shape) for item in new.values())
    count = 0
    for name, item in new.items():
        width = kind_of(item.dtype).width
        differs = as_words(base[name].data, width) != as_words(item.data, width)
        count += int(np.count_nonzero(differs))
    return count


def delta_files(
    base: Mapping[str, FullTensor],
    new: Mapping[str, FullTensor],
    *,
    version: str,
    base_version: str,
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a delta, the index last; without changes there is nothing else."""
    found: dict[str, CanonicalTensor] = {}
    for name, item in new.items():
        change = canonical.encode_canonical(base[name].data, item.data)
        if change is not None:
            found[name] = change
    shard = canonical.delta_shard_name(0, 1)
    if found:
        yield shard, canonical.render_delta_shard(found)
    weight_map = dict.fromkeys(found, shard)
    yield (
        INDEX,
        canonical.render_delta_index(weight_map, version=version, base_version=base_version),
    )


def full_files(
    tensors: Mapping[str, FullTensor], *, shard_bytes_max: int = SHARD_BYTES_MAX
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a full version, one shard at a time, the index last."""
    shards: list[dict[str, FullTensor]] = [{}]
    size = 0
    for name, item in sorted(tensors.items()):
        if shards[-1] and size + len(item.data) > shard_bytes_max:
            shards.append({})
            size = 0
        shards[-1][name] = item
        size += len(item.data)
    weight_map: dict[str, str] = {}
    for at, shard in enumerate(shards):
        file = canonical.full_shard_name(at, len(shards))
        weight_map |= dict.fromkeys(shard, file)
        yield file, canonical.render_full_shard(shard)
    total = sum(len(item.data) for item in tensors.values())
    yield INDEX, canonical.render_full_index(weight_map, total_size=total)


def _format_of(*, is_full: bool) -> WeightPayloadFormat:
    return WeightPayloadFormat.FULL_HF_CHECKPOINT if is_full else WeightPayloadFormat.XOR_DELTA


def _buffers(staged: StagedWeightVersionShardData) -> StagedBuffers:
    if not isinstance(staged.buffer_owner, StagedBuffers):
        raise TypeError(f"the trainer adapter staged a {type(staged.buffer_owner).__name__}")
    return staged.buffer_owner
