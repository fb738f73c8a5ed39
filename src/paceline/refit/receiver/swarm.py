"""A receiver's place among those that fetch the same versions: what it has, it serves on.

Every proven chunk is served under its own hash from the moment that it is here, and the control
service is told which ones those are. What the others said comes back with the same call.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.core.clock import Clock
from paceline.refit.control.protocol import ReplicaBoard
from paceline.refit.errors import ControlError, PublishError, StagingError
from paceline.refit.model import Replica, WeightVersionShardManifest
from paceline.refit.plan.sources import all_chunks
from paceline.refit.receiver.payload import PayloadBuffer
from paceline.refit.trainers.protocol import WeightVersionShardManifestPublisher
from paceline.refit.transports.protocol import ObjectServer, SupportsLoad

log = logging.getLogger(__name__)

BITS_BYTES_MAX = 2048
"""Of the service; a larger payload is announced when it is whole."""
RATES_MAX = 16


class RelayServer(ObjectServer, WeightVersionShardManifestPublisher, Protocol):
    """Serves chunks and manifests of this receiver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmOptions:
    """Where a receiver is, and how much it does for others."""

    region: str = ""
    """Receivers that say the same reach each other cheaply."""
    announce_s: float = 0.1
    """Between two announcements of a receiver that fetches; more when there are many."""
    announce_each_s: float = 0.005
    """So much more for every other receiver: the service hears the same number of calls."""
    stale_s: float = 1.5
    """Whoever fetches and has not been heard for so long is not waited for."""
    kept_bytes_max: int = 4 * 2**30
    """Payloads that are served on; the oldest go first, the newest always stays."""


class Swarm:
    """Serves this receiver's payloads; used from one thread."""

    def __init__(
        self,
        *,
        board: ReplicaBoard,
        server: RelayServer,
        worker_id: str,
        clock: Clock,
        options: SwarmOptions | None = None,
    ) -> None:
        """Take the parts; they stay the caller's."""
        self.board = board
        self.worker_id = worker_id
        self.clock = clock
        self.options = options or SwarmOptions()
        self._server = server
        self._kept: dict[tuple[str, str], Membership] = {}
        self._needed: dict[str, int] = {}
        """How many payloads have this chunk."""

    @property
    def region(self) -> str:
        """Where this receiver is."""
        return self.options.region

    def join(
        self,
        *,
        version_id: str,
        source_slot_id: str,
        manifest: WeightVersionShardManifest,
        payload: PayloadBuffer,
    ) -> "Membership":
        """Serve a payload while it comes in, and from then on.

        Raises:
            PublishError: the manifest cannot be served.
        """
        key = (version_id, source_slot_id)
        known = self._kept.get(key)
        if known is not None and known.payload is payload:
            known.offer_all()
            return known
        if known is not None:
            self._leave(key)
        address = self._server.publish_manifest(
            version_id=version_id, source_slot_id=source_slot_id, manifest=manifest
        )
        replica = Replica(
            version_id=version_id,
            source_slot_id=source_slot_id,
            worker_id=self.worker_id,
            manifest_endpoint=address,
            region=self.options.region,
        )
        membership = Membership(self, replica, payload)
        self._kept[key] = membership
        membership.offer_all()
        self._make_room(newest=key)
        return membership

    def find_replicas(self, version_id: str, *, source_slot_id: str) -> Sequence[Replica]:
        """Return the other receivers that serve a slot; none if the service does not say."""
        try:
            found = self.board.list_replicas(version_id)
        except ControlError as exc:
            log.info("replicas of %s not listed: %s", version_id, exc)
            return ()
        return [
            each
            for each in found
            if each.manifest_endpoint
            and each.source_slot_id == source_slot_id
            and each.worker_id != self.worker_id
        ]

    def keep_only(self, uids: frozenset[str]) -> None:
        """Stop serving versions that are not among these."""
        for key in [key for key in self._kept if key[0] not in uids]:
            self._leave(key)

    def close(self) -> None:
        """Stop serving everything."""
        self.keep_only(frozenset())

    def load(self) -> int:
        """Return how many reads of others are answered now, as far as the server knows."""
        return self._server.num_readers if isinstance(self._server, SupportsLoad) else 0

    def serve_chunk(self, chunk_id: str, data: memoryview) -> None:
        """Make one chunk readable; equal chunks are one object."""
        count = self._needed.get(chunk_id, 0)
        if count == 0:
            self._server.serve_object(chunk_id, [data])
        self._needed[chunk_id] = count + 1

    def _leave(self, key: tuple[str, str]) -> None:
        membership = self._kept.pop(key)
        replica = membership.replica
        try:
            self.board.withdraw_replica(
                version_id=replica.version_id,
                source_slot_id=replica.source_slot_id,
                worker_id=self.worker_id,
            )
        except ControlError as exc:
            log.info("replica of %s not withdrawn: %s", replica.version_id, exc)
        self._server.release_manifest(
            version_id=replica.version_id, source_slot_id=replica.source_slot_id
        )
        for chunk_id in membership.served.values():
            self._withdraw_chunk(chunk_id)

    def _withdraw_chunk(self, chunk_id: str) -> None:
        self._needed[chunk_id] -= 1
        if self._needed[chunk_id]:
            return
        del self._needed[chunk_id]
        try:
            self._server.withdraw_object(chunk_id)
        except StagingError as exc:
            # The bytes never change: a reader that stays inside only keeps them in memory.
            log.warning("a reader does not leave: %s", exc)

    def _make_room(self, *, newest: tuple[str, str]) -> None:
        """Stop serving the oldest payloads while all of them are too many bytes."""
        for key in list(self._kept):
            total = sum(each.payload.num_bytes for each in self._kept.values())
            if total <= self.options.kept_bytes_max:
                return
            if key != newest:
                self._leave(key)


class Membership:
    """One payload's part in the swarm."""

    def __init__(self, swarm: Swarm, replica: Replica, payload: PayloadBuffer) -> None:
        self.replica = replica
        self.payload = payload
        self.served: dict[int, str] = {}
        """Chunk number -> the id it is served under."""
        self._serves = 0
        """The same chunks as bits: what the others are told, since only these can be read."""
        self._swarm = swarm
        self.coming = 0
        """Chunks that this receiver is reading from far away, as bits."""
        self._told = -1
        self._others: Sequence[Replica] = ()
        self._heard_ms = 0
        """The service's time when it answered last."""
        self._due_s = -math.inf

    def offer_all(self) -> None:
        """Serve every chunk that is here."""
        for number in range(len(self.payload.chunks)):
            if self.payload.have >> number & 1:
                self.offer(number)

    def offer(self, number: int) -> None:
        """Serve a chunk that was proven; idempotent."""
        if number in self.served:
            return
        chunk_id = self.payload.chunks[number].sha256
        try:
            self._swarm.serve_chunk(chunk_id, self.payload.view(number))
        except PublishError as exc:
            log.warning("chunk %s is not served on: %s", chunk_id[:12], exc)
            return
        self.served[number] = chunk_id
        self._serves |= 1 << number

    def others(self, *, rates: Mapping[str, float]) -> Sequence[Replica]:
        """Return what the others have, after telling them what is here, if it is time for that.

        Never raises for a control service that is away: what was heard last stands.
        """
        now_s = self._swarm.clock.monotonic()
        have = self._serves
        is_news = have == all_chunks(len(self.payload.chunks)) and self._told != have
        if now_s < self._due_s and not is_news:
            return self._others
        options = self._swarm.options
        try:
            heard = self._swarm.board.announce_replica(self._current(have, rates))
        except ControlError as exc:
            log.info("replica of %s not announced: %s", self.replica.version_id, exc)
            self._due_s = now_s + 10 * options.announce_s
            return self._others
        self._told = have
        self._heard_ms = max((each.updated_at_unix_ms for each in heard), default=0)
        self._others = [
            each
            for each in heard
            if each.worker_id != self.replica.worker_id
            and each.source_slot_id == self.replica.source_slot_id
        ]
        self._due_s = now_s + options.announce_s + options.announce_each_s * len(self._others)
        return self._others

    def members(self) -> Sequence[Replica]:
        """Return who of this region may be waited for."""
        options = self._swarm.options
        return fetching_members(
            self._others, region=options.region, now_ms=self._heard_ms, stale_s=options.stale_s
        )

    def _current(self, have: int, rates: Mapping[str, float]) -> Replica:
        count = len(self.payload.chunks)
        size = (count + 7) // 8
        fastest = sorted(rates.items(), key=lambda pair: -pair[1])[:RATES_MAX]
        is_complete = have == all_chunks(count)
        can_say = not is_complete and size <= BITS_BYTES_MAX
        return replace(
            self.replica,
            chunks=have.to_bytes(size, "little") if can_say else b"",
            coming=self.coming.to_bytes(size, "little") if can_say else b"",
            is_complete=is_complete,
            load=self._swarm.load(),
            rates=tuple(fastest),
        )


def fetching_members(
    others: Sequence[Replica], *, region: str, now_ms: int, stale_s: float
) -> Sequence[Replica]:
    """Return who in a region still fetches, serves, and gets on with it: who may be waited for.

    Judged by the service's own times: clocks of machines differ.
    """
    return [
        each
        for each in others
        if each.region == region
        and each.manifest_endpoint
        and not each.is_complete
        and now_ms - each.updated_at_unix_ms <= stale_s * 1000
    ]
