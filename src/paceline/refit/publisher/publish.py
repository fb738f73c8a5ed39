"""One version: stage -> fence -> create -> serve -> describe -> advertise (READY) -> commit.

A failure before READY leaves the version before as it was and the base where it was; the uid
is not used again. Old versions leave when a newer full one makes them unnecessary, and their
memory comes back when no lease lives.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.waiting import wait_until
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import (
    AccessRefusedError,
    ControlError,
    ControlUnavailableError,
    NotFoundError,
    PreconditionError,
    PublishError,
    StagingError,
)
from paceline.refit.model import (
    InstalledReport,
    Shard,
    StagedWeightVersionShardData,
    TrainerStagingMode,
    VersionDescription,
    VersionRequest,
    VersionState,
    WeightPayloadFormat,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.publisher.checkpoint import place_of_files, show_files
from paceline.refit.publisher.composed import Composer
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.shelf import VersionShelf
from paceline.refit.publisher.together import Together, options_of
from paceline.refit.publisher.values import (
    Notify,
    OwnVersion,
    PublishedVersion,
    PublisherOptions,
    WeightSource,
    anchor_uid,
    composed_uid,
    sequence_of,
    version_uid,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import (
    SupportsAnchors,
    SupportsChain,
    SupportsSlots,
    TrainerEngineAdapter,
)
from paceline.refit.transports.protocol import SupportsCommits

log = logging.getLogger(__name__)

_POLL_S = 0.1
_T = TypeVar("_T")


class Publisher:
    """Publishes one trainer process's weights; ``publish`` belongs to the training thread."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        trainer: TrainerEngineAdapter,
        source: WeightSource,
        clock: Clock,
        options: PublisherOptions,
        notify: Notify = lambda name, fields: None,
    ) -> None:
        """Set up without I/O.

        Args:
            control: the control plane; stays the caller's.
            trainer: bound to its tensors; signs SupportsChain.
            source: serves bytes and manifests; stays the caller's.
            clock: for deadlines and durations.
            options: who, what, how patiently.
            notify: told of events.

        Raises:
            TypeError: the trainer cannot commit, discard and release.
        """
        if not isinstance(trainer, SupportsChain):
            raise TypeError("the trainer adapter must sign SupportsChain")
        self._control = control
        self._slot = trainer.source_slot_id
        self._slots = trainer.expected_source_slots if isinstance(trainer, SupportsSlots) else ()
        self._together: Together | None = None
        if len(self._slots) > 1:
            options = options_of(options, self._slot)
            self._together = Together(
                control=control, clock=clock, options=options, slot=self._slot, slots=self._slots
            )
        self._trainer = trainer
        self._chain: SupportsChain = trainer
        self._source = source
        self._clock = clock
        self._options = options
        self._notify = notify
        self._stopped = threading.Event()
        self._wait = options.heartbeat_wait or self._stopped.wait
        self._shelf = VersionShelf(
            control=control,
            chain=trainer,
            source=source,
            slot=self._slot,
            worker_id=options.worker_id,
            clock=clock,
        )
        self._composer = Composer()
        self._thread: threading.Thread | None = None
        self._next_sequence = 0
        self._head: OwnVersion | None = None
        self._needs_full = True
        self._needs_anchor = False
        self._beat_trouble: ControlError | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def trouble(self) -> ControlError | None:
        """The control service's last refusal in the background; None once it answers again."""
        return self._beat_trouble or self._shelf.trouble

    def start(self) -> None:
        """Register, find out which sequences this run has used, and keep the registration alive.

        Raises:
            ControlError: the control service does not answer in time, or refuses.
        """
        self._persist(self._register)
        if self._together is not None:
            self._together.start()  # which sequence comes next is agreed on at each version
        else:
            found = self._persist(lambda: self._control.list_versions(self._options.model_name))
            self._next_sequence = 1 + max(
                (sequence_of(version.uid, self._options.run_id) for version in found), default=-1
            )
        self._thread = threading.Thread(target=self._beat, name="paceline-publisher", daemon=True)
        self._thread.start()

    def publish(self, *, step: int) -> PublishedVersion:
        """Publish the weights as they are now; returns when the version is READY.

        Raises:
            StagingError: the bytes cannot be kept still now, also after waiting.
            PublishError: it could not be made fetchable; the version before is still served.
            ControlError: the control service does not answer, or refuses this worker.
        """
        if self._thread is None or self._stopped.is_set():
            raise PublishError("the publisher is not running: call start() first")
        started = self._clock.monotonic()
        self._shelf.release()
        sequence, needs_full = self._take_turn(step)
        wanted = self._options.payload_format
        needs_full = needs_full and wanted is WeightPayloadFormat.XOR_DELTA
        staged = self._stage(WeightPayloadFormat.FULL_TENSOR if needs_full else wanted)
        uid = version_uid(self._options.run_id, sequence)
        version = self._version(uid, staged, sequence=sequence, step=step)
        self._bring_out(version)
        self._chain.commit_staged(staged)
        self._head = version
        self._needs_full = self._is_in_place
        anchor_id, anchor_error = self._anchor(version)
        self._compose(version, anchor_id=anchor_id)
        self._shelf.retain(keep_old=self._options.keep_old)
        self._shelf.release()
        published = PublishedVersion(
            version_id=uid,
            sequence=sequence,
            step=step,
            root_digest=version.root_digest,
            payload_format=version.buffers.manifest.payload_format,
            payload_bytes=version.buffers.payload_bytes,
            full_bytes=version.buffers.full_bytes,
            changed_elements=version.buffers.changed_elements,
            total_elements=version.buffers.total_elements,
            publish_ms=1000 * (self._clock.monotonic() - started),
            anchor_id=anchor_id,
            anchor_error=anchor_error,
        )
        self._notify("version.published", published.to_fields())
        return published

    def before_step(self) -> None:
        """Call before each optimizer step when staging in place: takes live weights back.

        Returns at once with other staging modes.

        Raises:
            StagingError: readers still hold a version after ``stage_wait_s``.
        """
        if not self._is_in_place:
            return
        self._shelf.send_off()
        if not self._shelf.wait_released(self._options.stage_wait_s):
            raise StagingError(
                "engines still read the live weights, so the optimizer must not step; wait for "
                "their leases to end, or stage with COPY_TO_HOST"
            )

    def wait_installed(self, *, timeout_s: float) -> bool:
        """Wait until every live generator serves the newest version; False at the deadline.

        Generators that serve another run of the same model are not waited for.

        Raises:
            PublishError: nothing was published yet.
            ControlError: the control service does not answer, or refuses.
        """
        head = self._head
        if head is None:
            raise PublishError("nothing was published yet")
        try:
            wait_until(
                lambda: self._is_installed(head),
                what=f"installing {head.uid}",
                clock=self._clock,
                timeout_s=timeout_s,
                interval_s=_POLL_S,
            )
        except DeadlineExceededError:
            return False
        return True

    def close(self) -> None:
        """Retire every version, wait a bounded time for leases, and stop; idempotent.

        Readers that hold a lease even then are cut off. The object server stays open.
        """
        if self._thread is None or self._stopped.is_set():
            return
        self._shelf.send_off()
        self._shelf.wait_released(self._options.close_wait_s)
        self._stopped.set()
        self._thread.join(self._options.close_wait_s)
        self._shelf.cut_off()

    def _take_turn(self, step: int) -> tuple[int, bool]:
        """Return the sequence of what is published now, and whether it must be full."""
        sequence, needs_full = self._next_sequence, self._needs_full
        if self._together is not None:
            turn = self._together.agree(
                step=step,
                after=sequence - 1,
                head_uid=None if self._head is None else self._head.uid,
                needs_full=needs_full,
            )
            sequence, needs_full = turn.sequence, turn.is_full
        self._next_sequence = sequence + 1
        return sequence, needs_full

    @property
    def _is_in_place(self) -> bool:
        return self._options.staging_mode is TrainerStagingMode.IN_PLACE

    def _stage(self, payload_format: WeightPayloadFormat) -> StagedWeightVersionShardData:
        """Stage and wait for the fence; while readers hold the memory, wait for them."""
        self.before_step()
        deadline = self._clock.monotonic() + self._options.stage_wait_s
        staged = None
        while staged is None:
            try:
                staged = self._trainer.stage_shard(
                    tensors=None,
                    staging_mode=self._options.staging_mode,
                    payload_format=payload_format,
                )
            except StagingError:
                if self._clock.monotonic() + _POLL_S > deadline:
                    raise
                self._clock.sleep(_POLL_S)
                self._shelf.release()
        try:
            staged.publish_ready.wait()
        except BaseException:
            self._chain.discard_staged(staged)
            raise
        return staged

    def _version(
        self, uid: str, staged: StagedWeightVersionShardData, *, sequence: int, step: int
    ) -> OwnVersion:
        """Describe what was staged after the head."""
        buffers = staged.buffer_owner
        if not isinstance(buffers, StagedBuffers):
            raise TypeError(f"the trainer adapter staged a {type(buffers).__name__}")
        head = self._head
        is_delta = buffers.manifest.payload_format is WeightPayloadFormat.XOR_DELTA
        return OwnVersion(
            uid=uid,
            staged=staged,
            buffers=buffers,
            base_version_id=head.uid if is_delta and head else None,
            description=VersionDescription(
                run_id=self._options.run_id,
                sequence=sequence,
                step=step,
                root_digest=buffers.manifest.root_digest,
                parent_root=head.description.root_digest if head else None,
                payload_bytes=buffers.payload_bytes,
                full_bytes=buffers.full_bytes,
                changed_elements=buffers.changed_elements,
                total_elements=buffers.total_elements,
            ),
        )

    def _bring_out(self, version: OwnVersion) -> None:
        """Make a staged version READY, or take every trace of it back and raise."""
        try:
            self._persist(self._register)
            self._create(version)
            self._shelf.serve(version)
            show_files(self._source, version, self._options.checkpoint_files)
            self._advertise(version)
        except BaseException as exc:
            self._take_back(version, exc)
            if not isinstance(exc, PacelineError) or isinstance(
                exc, PublishError | ControlUnavailableError | AccessRefusedError
            ):
                raise
            raise PublishError(
                f"version {version.uid} was not published: {exc}; the version before is still "
                "served, the next publish starts afresh"
            ) from exc
        self._shelf.keep(version)

    def _create(self, version: OwnVersion) -> None:
        request = self._request(version)
        try:
            self._persist(lambda: self._control.create_version(request))
        except (NotFoundError, PreconditionError):
            # The control service lost the base or released it: only a full version goes on.
            self._needs_full = True
            raise

    def _request(self, version: OwnVersion) -> VersionRequest:
        request = VersionRequest(
            model_name=self._options.model_name,
            idempotency_key=version.uid,
            payload_format=version.buffers.manifest.payload_format,
            base_version_id=version.base_version_id,
            expected_source_slots=(self._slot,),
            object_storage=place_of_files(self._source, version),
            uid=version.uid,
        )
        if self._together is None:
            return request
        return self._together.request(request, step=version.description.step)

    def _advertise(self, version: OwnVersion) -> None:
        manifest = version.manifest(self._options.sign)
        address = self._source.publish_manifest(
            version_id=version.uid, source_slot_id=self._slot, manifest=manifest
        )
        self._describe(version)
        shard = Shard(
            version_id=version.uid,
            source_slot_id=self._slot,
            worker_id=self._options.worker_id,
            tensor_count=manifest.tensor_count,
            total_bytes=manifest.total_bytes,
            manifest_digest=manifest.digest,
            manifest_endpoint=address,
        )
        version.is_advertised = True
        state = self._persist(lambda: self._control.create_shard(shard)).state
        is_last = state is VersionState.READY
        if self._together is not None:
            self._together.wait_ready(version.uid)
            found = self._persist(lambda: self._control.get_version(version.uid)).description
            version.version_root = "" if found is None else found.root_digest
        elif not is_last:
            raise PublishError(f"version {version.uid} is {state} although its shard is there")
        if is_last:
            self._commit(version)

    def _describe(self, version: OwnVersion) -> None:
        slot = None if self._together is None else self._slot
        self._persist(
            lambda: self._control.describe_version(
                version.uid, version.description, source_slot_id=slot
            )
        )

    def _commit(self, version: OwnVersion) -> None:
        """Tell those who only see the source; a failure is made up for by the next commit."""
        if isinstance(self._source, SupportsCommits):
            ready = self._persist(lambda: self._control.get_version(version.uid))
            shards = self._persist(lambda: self._control.list_shards(version.uid))
            try:
                self._source.commit_version(ready, shards)
            except PublishError as exc:
                log.warning("version %s was not committed to the bucket: %s", version.uid, exc)

    def _take_back(self, version: OwnVersion, cause: BaseException) -> None:
        """Undo a publication that failed.

        If the shard was sent, its reply may have been lost and an engine may be reading: then
        the version leaves like any other, once no lease lives, and a full version follows for
        engines that installed it.
        """
        # The others of several processes may hold another base by now: all of them start anew.
        self._needs_full |= self._together is not None
        if version.is_advertised:
            self._needs_anchor = True
        else:
            self._shelf.take_down(version)
        self._shelf.send_off([version])
        if not isinstance(cause, ControlUnavailableError):
            self._shelf.release()

    def _anchor(self, version: OwnVersion) -> tuple[str | None, str | None]:
        """Publish the same weights as a full version if one is due; a failure is returned."""
        sequence = version.description.sequence
        if version.is_full or not isinstance(self._trainer, SupportsAnchors):
            self._needs_anchor = False
            return None, None
        is_due = sequence - self._shelf.newest_full() >= self._options.anchor_every
        if not (is_due or self._needs_anchor):
            return None, None
        staged = self._trainer.stage_committed()
        step = version.description.step
        anchor = self._version(anchor_uid(version.uid), staged, sequence=sequence, step=step)
        anchor.description = replace(
            anchor.description, parent_root=version.description.parent_root
        )
        self._needs_anchor = True
        try:
            self._bring_out(anchor)
        except (PublishError, ControlError) as exc:
            return None, str(exc)
        self._needs_anchor = False
        return anchor.uid, None

    def _compose(self, version: OwnVersion, *, anchor_id: str | None) -> None:
        """Publish one delta from the newest full version; a failure costs late joiners bytes."""
        if not self._options.compose:
            return
        if version.is_full or anchor_id is not None:
            self._composer.start_from(anchor_id or version.uid, version.description)
            self._shelf.retire_composed(below=version.description.sequence)
            return
        made = self._composer.extend(version, transport=self._source.transport)
        if made is None:
            return
        said = version.description
        uid = composed_uid(version.uid, base_sequence=made.base.sequence)
        own = self._version(uid, made.staged, sequence=said.sequence, step=said.step)
        own.is_composed = True
        own.base_version_id = made.base_uid
        own.description = replace(own.description, parent_root=made.base.root_digest)
        try:
            self._bring_out(own)
        except (PublishError, ControlError) as exc:
            log.warning("version %s has no composed delta: %s", version.uid, exc)
            return
        self._shelf.retire_composed(below=said.sequence)

    def _is_installed(self, head: OwnVersion) -> bool:
        model_name = self._options.model_name
        workers = self._control.list_workers(model_name)
        reports = {report.worker_id: report for report in self._control.list_installed(model_name)}
        return all(
            self._has_it_or_is_elsewhere(reports.get(worker.worker_id), head)
            for worker in workers
            if worker.role is WorkerRole.GENERATOR
        )

    def _has_it_or_is_elsewhere(self, report: InstalledReport | None, head: OwnVersion) -> bool:
        """Say whether an engine serves ``head``, or follows another run of the same model."""
        if report is None:
            return False
        uid = report.version_id
        is_elsewhere = uid != "" and sequence_of(uid, self._options.run_id) < 0
        return is_elsewhere or report.root_digest == head.root_digest

    def _register(self) -> None:
        self._control.register_worker(
            WorkerRegistration(
                worker_id=self._options.worker_id,
                role=WorkerRole.TRAINER,
                model_name=self._options.model_name,
            ),
            ttl_seconds=self._options.registration_ttl_s,
        )

    def _beat(self) -> None:
        """Keep the registration alive and release in the background, until stopped."""
        while not self._wait(self._options.registration_ttl_s / 3):
            try:
                self._register()
                self._beat_trouble = None
            except ControlError as exc:
                self._beat_trouble = exc
                continue
            self._shelf.release()

    def _persist(self, call: Callable[[], _T]) -> _T:
        """Repeat an idempotent call while the service does not answer, until the deadline."""
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)
