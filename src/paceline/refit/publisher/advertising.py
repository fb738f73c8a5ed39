"""One staged version, made READY: create -> serve -> describe -> advertise -> commit.

It comes out whole, or every trace of it is taken back.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import (
    AccessRefusedError,
    ControlUnavailableError,
    NotFoundError,
    PreconditionError,
    PublishError,
)
from paceline.refit.model import Shard, TrainerStagingMode, VersionRequest, VersionState
from paceline.refit.publisher.checkpoint import place_of_files, show_files
from paceline.refit.publisher.heartbeat import Heartbeat
from paceline.refit.publisher.in_place import LiveWeights
from paceline.refit.publisher.patience import persist
from paceline.refit.publisher.shelf import VersionShelf
from paceline.refit.publisher.together import Together
from paceline.refit.publisher.values import OwnVersion, PublisherOptions, WeightSource
from paceline.refit.transports.protocol import SupportsCommits

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class Due:
    """What versions to come have to be, because of what became of those before."""

    full: bool = True
    """The next one starts anew: there is no base that everybody has."""
    anchor: bool = False
    """A full version stands beside the next delta."""


class Advertiser:
    """Has one publisher's versions known; belongs to the thread that publishes."""

    def __init__(  # noqa: PLR0913 - the parts of one publisher
        self,
        *,
        control: ControlPlane,
        source: WeightSource,
        slot: str,
        together: Together | None,
        shelf: VersionShelf,
        heartbeat: Heartbeat,
        live: LiveWeights,
        due: Due,
        clock: Clock,
        options: PublisherOptions,
    ) -> None:
        """Take the publisher's parts; ``due`` is written when a version does not come out."""
        self._control = control
        self._source = source
        self._slot = slot
        self._together = together
        self._shelf = shelf
        self._heartbeat = heartbeat
        self._live = live
        self._due = due
        self._clock = clock
        self._options = options

    def bring_out(self, version: OwnVersion) -> None:
        """Make a staged version READY, or take every trace of it back and raise."""
        try:
            if self._options.staging_mode is TrainerStagingMode.WRITE_TO_STORAGE:
                self._shelf.serve(version)  # it is there already; so it goes if this fails
            self._persist(self._heartbeat.register)
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
            self._due.full = True
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
        if not self._heartbeat.is_running:  # nobody would ever take it back
            raise PublishError(f"version {version.uid}: the publisher was closed meanwhile")
        self._live.require_still(version)
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
            self._together.wait_ready(version.uid, step=version.description.step)
            version.whole = self._persist(
                lambda: self._control.get_version(version.uid)
            ).description
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
        self._due.full |= self._together is not None
        if version.is_advertised:
            self._due.anchor = True
        else:
            self._shelf.take_down(version)
        self._shelf.send_off([version])
        if not isinstance(cause, ControlUnavailableError):
            self._shelf.release()

    def _persist(self, call: Callable[[], _T]) -> _T:
        """Repeat an idempotent call while the service does not answer, until the deadline."""
        return persist(call, clock=self._clock, wait_s=self._options.control_wait_s)
