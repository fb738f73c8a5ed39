"""Publications one after another, behind training: one thread, in the order of the calls.

Training hands a capture over and goes on. How a publication ended is asked of it; a failure that
nobody asked about is raised by the next call of the training loop. What follows a version that is
READY neither delays the answer nor changes it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Self, TypeAlias

from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.refit.errors import ControlUnavailableError, PublishError, VersionSkippedError
from paceline.refit.publisher.values import Notify, PublishedVersion

log = logging.getLogger(__name__)


OnFailure: TypeAlias = "Callable[[Publication, BaseException], None]"


class PublicationState(StrEnum):
    """How far a publication is."""

    WAITING = "waiting"
    """Captured; those before it are not out yet."""
    UNDERWAY = "underway"
    READY = "ready"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Left out, as the policy for a full ring says."""


class Publication:
    """One call of ``publish``: how far it is, and what came of it."""

    def __init__(self, *, version_id: str, sequence: int, step: int, wait_s: float) -> None:
        self.version_id = version_id
        """Several processes agree on it behind training: until then it is what this one expects."""
        self.sequence = sequence
        self.step = step
        self._wait_s = wait_s
        self._end: Future[PublishedVersion] = Future()
        self._is_seen = False

    @property
    def state(self) -> PublicationState:
        """How far it is."""
        if not self._end.done():
            return PublicationState.UNDERWAY if self._end.running() else PublicationState.WAITING
        if isinstance(self._end.exception(), VersionSkippedError):
            return PublicationState.SKIPPED
        return PublicationState.FAILED if self._end.exception() else PublicationState.READY

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._end.done()

    @property
    def version(self) -> PublishedVersion | None:
        """What was published; None before it is READY, or if it did not come out."""
        return self._end.result() if self.state is PublicationState.READY else None

    def result(self, timeout_s: float | None = None) -> PublishedVersion:
        """Wait until the version is READY and return it.

        Args:
            timeout_s: how long; the publisher's ``publish_wait_s`` by default.

        Raises:
            DeadlineExceededError: it is still underway.
            VersionSkippedError: it was left out.
            PublishError: it could not be made fetchable; the version before is still served.
            ControlError: the control service does not answer, or refuses this worker.
        """
        timeout_s = self._wait_s if timeout_s is None else timeout_s
        wait([self._end], timeout_s)
        if not self._end.done():
            raise DeadlineExceededError(
                f"version {self.version_id} is {self.state} after {timeout_s:g} s; ask again later"
            )
        self._is_seen = True
        return self._end.result()

    def begin(self) -> None:
        """Say that it is underway."""
        self._end.set_running_or_notify_cancel()

    def succeed(self, version: PublishedVersion) -> None:
        """Say what was published."""
        self._end.set_result(version)

    def fail(self, cause: BaseException) -> None:
        """Say why it did not come out."""
        self._end.set_exception(cause)

    def to_fields(self, cause: BaseException) -> dict[str, object]:
        """Return the fields of the event that says why it did not come out."""
        return {
            "version_id": self.version_id,
            "sequence": self.sequence,
            "step": self.step,
            "reason": str(cause),
        }

    def unseen(self) -> BaseException | None:
        """Return why it failed, once, unless somebody was told of it already."""
        if self._is_seen or self.state is not PublicationState.FAILED:
            return None
        self._is_seen = True
        return self._end.exception()


def tell_failure(notify: Notify, publication: Publication, cause: BaseException) -> None:
    """Say in the log and to the run why a publication did not come out."""
    is_skipped = isinstance(cause, VersionSkippedError)
    name = "version.skipped" if is_skipped else "version.failed"
    log.info("%s %s: %s", name, publication.version_id, cause)
    if not isinstance(cause, ControlUnavailableError):  # it would not hear of it either
        notify(name, publication.to_fields(cause))


def tell_left_undone(notify: Notify, publication: Publication, cause: BaseException) -> None:
    """Say in the log and to the run what was not done after a version was READY."""
    is_ours = isinstance(cause, PacelineError)
    name = publication.version_id
    log.warning("after version %s was READY: %s", name, cause, exc_info=None if is_ours else cause)
    notify("version.left_undone", publication.to_fields(cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A version that is READY, and what is left to do behind it."""

    version: PublishedVersion
    then: Sequence[Callable[[], None]] = ()
    """Each is tried, in this order; one that fails is told of, and is not the version's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A publication, how to carry it out, and how to give back what it holds otherwise."""

    publication: Publication
    work: Callable[[], Outcome]
    give_back: Callable[[], None]


class Line:
    """Carries jobs out in their order."""

    def __init__(
        self,
        *,
        on_failure: OnFailure,
        on_left_undone: OnFailure = lambda publication, cause: None,
    ) -> None:
        """Take who is told of a job that failed or was dropped, and who of what followed one.

        Neither may raise.
        """
        self._on_failure = on_failure
        self._on_left_undone = on_left_undone
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._ended: list[Publication] = []
        """Not looked at yet by ``raise_unseen``."""
        self._num_ended = 0
        self._is_busy = False
        self._is_closed = False
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-publish", daemon=True)

    @classmethod
    def telling(cls, notify: Notify) -> Self:
        """Return a line whose failures go to the log and the run."""
        return cls(
            on_failure=partial(tell_failure, notify),
            on_left_undone=partial(tell_left_undone, notify),
        )

    def require_new(self) -> None:
        """Refuse a second start. Raises PublishError."""
        if self._is_closed or self._thread.ident is not None:
            raise PublishError(
                "a publisher starts once, by start() or by being entered; make another one with "
                "run.publisher(...)"
            )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread capture at a time: versions are counted in the order of their weights.

        Raises:
            PublishError: it is not started, or closed.
            PublishError, ControlError: a publication failed and nobody was told of it.
        """
        with self._turn:
            if self._is_closed:
                raise PublishError("the publisher is closed: make another one, run.publisher(...)")
            if self._thread.ident is None:
                raise PublishError("the publisher is not running: call start() first")
            self.raise_unseen()
            yield

    def hand_over(self, job: Job) -> None:
        """Put a job at the end. Raises PublishError after ``close``."""
        with self._changed:
            if not self._is_closed:
                self._jobs.append(job)
                self._changed.notify_all()
                return
        job.give_back()
        raise PublishError("the publisher was closed meanwhile")

    def leave_out(self, publication: Publication, cause: VersionSkippedError) -> None:
        """End a publication that nothing was captured for."""
        self._on_failure(publication, cause)
        publication.fail(cause)

    def drop_oldest(self) -> bool:
        """Drop the oldest job that has not begun, in favour of newer weights."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            return False
        self._end_unpublished(
            job,
            VersionSkippedError(
                f"version {job.publication.version_id} was dropped: newer weights came before it "
                "was its turn, and memory for staging was full"
            ),
        )
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job has ended; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_working, timeout_s)

    def wait_for_one(self, timeout_s: float) -> bool:
        """Wait until one more job has ended; False if there is none, or at the deadline."""
        with self._changed:
            before = self._num_ended
            if not self.is_working:
                return False
            return self._changed.wait_for(lambda: self._num_ended > before, timeout_s)

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody was told of; later ones are in the log."""
        with self._changed:
            ended, self._ended = self._ended, []
        found = [cause for cause in (each.unseen() for each in ended) if cause is not None]
        for cause in found[1:]:
            log.warning("a publication failed after another one: %s", cause)
        if found:
            raise found[0]

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, and wait for those there are; False if one outlived the deadline.

        What has not begun by then is dropped.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_working, timeout_s)
            left = list(self._jobs)
            self._jobs.clear()
        for job in left:
            self._end_unpublished(
                job,
                PublishError(
                    f"version {job.publication.version_id} was not published: it was closed before"
                ),
            )
        with self._changed:
            return not self._is_busy

    @property
    def is_working(self) -> bool:
        """Whether a job is underway or waits."""
        return bool(self._jobs) or self._is_busy

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            self._carry_out(job)
            with self._changed:
                self._is_busy = False
                self._note_end(job.publication)

    def _carry_out(self, job: Job) -> None:
        job.publication.begin()
        try:
            outcome = job.work()
        except BaseException as exc:  # noqa: BLE001 - told to whoever asks, or the next call
            self._on_failure(job.publication, exc)
            job.publication.fail(exc)
            return
        job.publication.succeed(outcome.version)
        for step in outcome.then:
            try:
                step()
            except BaseException as exc:  # noqa: BLE001 - told at once: the version is out
                self._on_left_undone(job.publication, exc)

    def _end_unpublished(self, job: Job, cause: PublishError) -> None:
        job.give_back()
        self._on_failure(job.publication, cause)
        job.publication.fail(cause)
        with self._changed:
            self._note_end(job.publication)

    def _note_end(self, publication: Publication) -> None:
        self._num_ended += 1
        if publication.state is PublicationState.FAILED:
            self._ended.append(publication)
        self._changed.notify_all()
