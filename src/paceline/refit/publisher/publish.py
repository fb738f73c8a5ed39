"""One version: capture, then stage -> fence -> create -> serve -> describe -> READY -> commit.

Training stands for the capture; the rest happens behind it, one version after another. A failure
before READY leaves the version before as it was and the base where it was; the uid is not used
again. What fails after it is told of and leaves the version READY. Old versions leave when a newer
full one makes them unnecessary, and their memory comes back when no lease lives.
"""

import logging
import operator
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.waiting import wait_until
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import (
    ControlError,
    PublishError,
    VersionSkippedError,
)
from paceline.refit.model import (
    StagedWeightVersionShardData,
    TrainerStagingMode,
    VersionDescription,
    WeightPayloadFormat,
)
from paceline.refit.publisher.advertising import Advertiser, Due
from paceline.refit.publisher.capturing import Capturer
from paceline.refit.publisher.composed import Composer
from paceline.refit.publisher.heartbeat import Heartbeat
from paceline.refit.publisher.in_place import HasStepHook, LiveWeights
from paceline.refit.publisher.installed import is_installed
from paceline.refit.publisher.line import (
    Job,
    Line,
    Outcome,
    Publication,
)
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.resuming import alone, take_up
from paceline.refit.publisher.shelf import VersionShelf
from paceline.refit.publisher.together import Together, options_of
from paceline.refit.publisher.values import (
    Head,
    Notify,
    OwnVersion,
    PublisherOptions,
    WeightSource,
    anchor_uid,
    composed_uid,
    published_version,
    version_uid,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import (
    SupportsAnchors,
    SupportsChain,
    SupportsSlots,
    TrainerEngineAdapter,
)

log = logging.getLogger(__name__)

_POLL_S = 0.1
_T = TypeVar("_T")


class Publisher:
    """Publishes one trainer process's weights; ``publish`` belongs to the training thread.

    What it does behind training is done by one thread, which alone moves the head and the base.
    """

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
        self._shelf = VersionShelf(
            control=control,
            chain=trainer,
            source=source,
            slot=self._slot,
            worker_id=options.worker_id,
            clock=clock,
        )
        self._composer = Composer()
        self._line = Line.telling(notify)
        self._capturer = Capturer(
            trainer=trainer, line=self._line, shelf=self._shelf, clock=clock, options=options
        )
        self._live = LiveWeights(
            trainer=trainer, source=source, line=self._line, shelf=self._shelf, options=options
        )
        self._heartbeat = Heartbeat(control, options, then=self._shelf.release)
        self._due = Due()
        self._advertiser = Advertiser(
            control=control,
            source=source,
            slot=self._slot,
            together=self._together,
            shelf=self._shelf,
            heartbeat=self._heartbeat,
            live=self._live,
            due=self._due,
            clock=clock,
            options=options,
        )
        self._run_id = options.run_id
        self._next_sequence = 0
        self._agreed = -1
        """The last sequence that several processes published under."""
        self._head: Head | None = None

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

    @property
    def trouble(self) -> ControlError | None:
        """The control service's last refusal in the background; None once it answers again."""
        return self._heartbeat.trouble or self._shelf.trouble

    @property
    def run_id(self) -> str:
        """The run that is published to; another than asked for only with ``new-run``."""
        return self._run_id

    def start(self) -> None:
        """Register, find out where the run is, and keep the registration alive.

        If the run has published something, the weights as they are now are compared with the last
        of it: equal ones go on with the chain, for others see ``WhenUnproven``. Of a trainer of
        several processes, start all: they wait for each other, and all of them have to have them.

        Raises:
            ControlError: the control service does not answer in time, or refuses.
            PublishError: it was started before, or the weights are not those that the run
                published last.
        """
        self._line.require_new()
        self._persist(self._heartbeat.register)
        self._heartbeat.start()  # a proof takes longer than a registration may last
        try:
            self._take_up()
            self._capturer.prepare()
        except BaseException:
            self._heartbeat.stop(self._options.control_wait_s)
            raise
        self._line.start()

    def publish(self, *, step: int) -> Publication:
        """Publish the weights as they are now; returns as soon as the optimizer may step.

        Encoding, hashing, uploading and advertising happen behind training, one version after
        another. ``result()`` of what is returned waits until the version is READY.

        Raises:
            StagingError: the bytes cannot be kept still now, also after waiting.
            PublishError, ControlError: an earlier publication failed and nobody asked about it;
                nothing was captured, publish again.
        """
        with self._line.turn():
            return self._publish_next(step=operator.index(step))

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything captured so far is out; False at the deadline.

        Raises:
            PublishError, ControlError: one failed and nobody asked about it.
        """
        is_out = self._line.wait_idle(timeout_s)
        self._line.raise_unseen()
        return is_out

    def before_step(self) -> None:
        """Call before each optimizer step when staging in place: takes live weights back.

        Returns at once with other staging modes.

        Raises:
            StagingError: readers still hold a version after ``stage_wait_s``.
        """
        if self._is_in_place and self._heartbeat.is_running:
            self._live.take_back()

    def protect(self, optimizer: HasStepHook) -> None:
        """Have an optimizer call ``before_step`` by itself, before each of its steps."""
        optimizer.register_step_pre_hook(lambda *_: self.before_step())

    def wait_installed(self, *, timeout_s: float) -> bool:
        """Wait until every live generator serves the newest version; False at the deadline.

        Generators that serve another run of the same model are not waited for.

        Raises:
            PublishError: nothing was published yet.
            ControlError: the control service does not answer, or refuses.
        """
        deadline = self._clock.monotonic() + timeout_s
        if not self.flush(timeout_s=timeout_s):
            return False
        head = self._head
        if head is None:
            raise PublishError("nothing was published yet")
        name, run_id = self._options.model_name, self._run_id
        try:
            wait_until(
                lambda: is_installed(self._control, head, model_name=name, run_id=run_id),
                what=f"installing {head.uid}",
                clock=self._clock,
                timeout_s=max(0.0, deadline - self._clock.monotonic()),
                interval_s=_POLL_S,
            )
        except DeadlineExceededError:
            return False
        return True

    def close(self) -> None:
        """Finish what was captured, retire every version, and stop; idempotent.

        Publications and leases are waited for a bounded time each. Readers that hold a lease even
        then are cut off. The object server stays open.

        Raises:
            PublishError, ControlError: a publication failed and nobody asked about it.
        """
        self._close()
        self._line.raise_unseen()

    def _close(self) -> None:
        if not self._heartbeat.is_running:
            return
        options = self._options
        is_idle = self._line.close(options.close_wait_s)
        self._shelf.send_off()
        self._shelf.wait_released(options.close_wait_s)
        self._heartbeat.stop(options.close_wait_s)
        if is_idle or self._line.wait_idle(options.control_wait_s):
            self._shelf.cut_off()
        else:
            log.warning("a publication did not end in time; its memory is not given back")

    def _publish_next(self, *, step: int) -> Publication:
        started = self._clock.monotonic()
        sequence = self._next_sequence
        self._next_sequence += 1
        publication = Publication(
            version_id=version_uid(self._run_id, sequence),
            sequence=sequence,
            step=step,
            wait_s=self._options.publish_wait_s,
        )
        try:
            self.before_step()
            captured = self._capturer.capture(needs_full=lambda: self._due.full)
        except VersionSkippedError as exc:
            self._line.leave_out(publication, exc)
            return publication
        stall_ms = 1000 * (self._clock.monotonic() - started)
        self._line.hand_over(
            Job(
                publication=publication,
                work=lambda: self._publish(publication, captured, started, stall_ms),
                give_back=lambda: self._capturer.give_back(captured),
            )
        )
        return publication

    def _take_up(self) -> None:
        """Find out where the run is."""
        options, root_of_all = self._options, alone
        if self._together is not None:
            self._together.start()
            root_of_all = self._together.root_of_all
        found = self._persist(lambda: self._control.list_versions(options.model_name))
        start = take_up(found, self._trainer, options, root_of_all=root_of_all)
        if self._together is not None:
            self._together.run_id = start.run_id
        self._run_id, self._next_sequence = start.run_id, start.next_sequence
        self._head = start.head
        if start.head is not None:
            self._due.full, self._due.anchor = False, True
        if start.event:
            log.info("%s: %s", start.event, start.reason)
            self._notify(start.event, start.to_fields())

    def _take_turn(self, publication: Publication) -> bool:
        """Say whether it must be full; several processes agree on that, and on which one it is."""
        if self._together is None:
            return self._due.full
        turn = self._together.agree(
            step=publication.step,
            after=self._agreed,
            head_uid=None if self._head is None else self._head.uid,
            needs_full=self._due.full,
        )
        self._agreed = publication.sequence = turn.sequence
        publication.version_id = version_uid(self._run_id, turn.sequence)
        self._next_sequence = max(self._next_sequence, turn.sequence + 1)
        if turn.is_given_up:
            self._due.full = True
            raise PublishError(
                f"step {publication.step} was given up by the other processes of this trainer, "
                "which waited for this one in vain; publish the next step"
            )
        return turn.is_full

    @property
    def _is_in_place(self) -> bool:
        return self._options.staging_mode is TrainerStagingMode.IN_PLACE

    def _publish(
        self, publication: Publication, captured: object, started: float, stall_ms: float
    ) -> Outcome:
        """Do what training does not stand for; in the line's thread."""
        wanted = self._options.wanted
        try:
            needs_full = self._take_turn(publication) and wanted is WeightPayloadFormat.XOR_DELTA
        except BaseException:
            self._capturer.give_back(captured)
            raise
        full = WeightPayloadFormat.FULL_TENSOR
        staged = self._capturer.stage(captured, full if needs_full else wanted)
        uid, step = publication.version_id, publication.step
        version = self._version(uid, staged, sequence=publication.sequence, step=step)
        self._advertiser.bring_out(version)
        self._chain.commit_staged(staged)
        self._head = Head(
            uid=uid,
            root_digest=version.root_digest,
            slot_root=version.description.root_digest,
        )
        self._due.full = False
        publish_ms = 1000 * (self._clock.monotonic() - started)
        anchor_id, anchor_error = self._anchor(version)
        self._shelf.retain(keep_old=self._options.keep_old)
        self._shelf.release()
        published = published_version(
            version,
            publish_ms=publish_ms,
            stall_ms=stall_ms,
            anchor_id=anchor_id,
            anchor_error=anchor_error,
        )
        self._notify("version.published", published.to_fields())
        return Outcome(
            version=published,
            then=(
                lambda: self._compose(version, anchor_id=anchor_id),
                self._shelf.release,
                self._capturer.prepare,
            ),
        )

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
                run_id=self._run_id,
                sequence=sequence,
                step=step,
                root_digest=buffers.manifest.root_digest,
                parent_root=head.slot_root if head else None,
                payload_bytes=buffers.payload_bytes,
                full_bytes=buffers.full_bytes,
                changed_elements=buffers.changed_elements,
                total_elements=buffers.total_elements,
            ),
        )

    def _anchor(self, version: OwnVersion) -> tuple[str | None, str | None]:
        """Publish the same weights as a full version if one is due; a failure is returned."""
        sequence = version.description.sequence
        if version.is_full or not isinstance(self._trainer, SupportsAnchors):
            self._due.anchor = False
            return None, None
        is_due = sequence - self._shelf.newest_full() >= self._options.anchor_every
        if not (is_due or self._due.anchor):
            return None, None
        self._due.anchor = True
        try:
            staged = self._trainer.stage_committed()
            step = version.description.step
            anchor = self._version(anchor_uid(version.uid), staged, sequence=sequence, step=step)
            anchor.description = replace(
                anchor.description, parent_root=version.description.parent_root
            )
            self._advertiser.bring_out(anchor)
        except PacelineError as exc:
            return None, str(exc)
        self._due.anchor = False
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
            self._advertiser.bring_out(own)
        except (PublishError, ControlError) as exc:
            log.warning("version %s has no composed delta: %s", version.uid, exc)
            return
        self._shelf.retire_composed(below=said.sequence)

    def _persist(self, call: Callable[[], _T]) -> _T:
        """Repeat an idempotent call while the service does not answer, until the deadline."""
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)
