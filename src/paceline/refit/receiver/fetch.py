"""Getting a version's bytes: sizes are checked before memory is taken, hashes as bytes arrive.

A payload is fetched window by window, into memory that is used again for the next. Within one,
every piece is proven, while it is still in the cache, and put where it waits as the next travels.
What is larger than a window comes in stretches and is proven at its end.
A source that is cut, gone or slow is helped out by another; one that lies is not asked again. What
comes out is whole and proven, or an error: nobody sees anything in between. Where receivers serve
each other, ``spread`` takes the place of the windows.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, LyingSourceError, VerifyError
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX
from paceline.refit.manifest.signature import Trust, parse_signed
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import ObjectRange, Replica, Shard
from paceline.refit.receiver.attempt import Attempt, Tools, lying
from paceline.refit.receiver.pieces import (
    Piece,
    Stretches,
    Target,
    chunk_pieces,
    pieces_of,
    windows_of,
)
from paceline.refit.receiver.prover import Prover
from paceline.refit.receiver.spool import Spool, Spooled
from paceline.refit.receiver.spread import Order, Spread
from paceline.refit.receiver.watch import Watch, WatchRules
from paceline.refit.transports.protocol import ObjectReader, TransferRecord, open_session

T = TypeVar("T")

TRUSTED_TRANSPORTS = frozenset({"nixl"})
"""They run inside one trusted network only: content digests are proof enough there."""
_PROVERS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of one fetch."""

    read_timeout_s: float = 20.0
    """For one manifest, and for each chunk or tensor to arrive."""
    hedge_after_s: float = 3.0
    """When nothing came from a source for so long, another one is asked for the same."""
    window_bytes: int = 32 * 2**20
    """Asked for at a time; up to twice this is held in memory."""
    spool_dir: Path | None = None
    """Where payloads above a window wait until they are proven; None is the system's place."""
    spool_keep_s: float = 600.0
    """How long a file there is kept for the next payload; 0: it goes with its payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchParts:
    """What a fetcher works with."""

    clock: Clock
    between_reads: Callable[[], None] = lambda: None
    """Called before each read; what it raises ends the fetch."""
    on_record: Callable[[TransferRecord], None] = lambda record: None
    """Told of every run, good or bad."""
    limits: FetchLimits = field(default_factory=FetchLimits)
    trust: Trust | None = None
    """What the manifest's signature must say; None takes the manifest that is advertised."""
    spread: Spread | None = None
    """The other receivers; None reads from the advertised sources alone."""
    spool: Spool | None = None
    """Kept by whoever fetches one version after another; None is a fetcher's own."""


def spool_of(limits: FetchLimits, clock: Clock) -> Spool:
    """Return where payloads wait under these limits; no I/O."""
    return Spool(
        memory_bytes_max=limits.window_bytes,
        clock=clock,
        directory=limits.spool_dir,
        keep_s=limits.spool_keep_s,
    )


class Fetcher:
    """Reads one version's manifest and objects from whichever source answers rightly."""

    def __init__(self, reader: ObjectReader, parts: FetchParts) -> None:
        """Take the reader, which moves bytes and proves nothing."""
        self._reader = reader
        self._parts = parts
        self._limits = parts.limits
        self._spool = parts.spool or spool_of(parts.limits, parts.clock)
        self._liars: set[str] = set()
        """Endpoints that are not asked any more."""
        self._manifest_data = b""

    def fetch_manifest(self, sources: Sequence[Shard]) -> Manifest:
        """Return the manifest that the shards advertise, from one of them or another receiver.

        Raises:
            FetchError: no source gave it.
            VerifyError: what came has another digest than advertised, breaks the format, or is
                not signed as it must be.
        """
        wanted = sources[0].manifest_digest

        def read(source: Shard | Replica) -> Manifest:
            data = self._reader.read_manifest(
                source.manifest_endpoint,
                size_max=MANIFEST_BYTES_MAX,
                timeout_s=self._limits.read_timeout_s,
            )
            found = hashlib.sha256(data).hexdigest()
            if found != wanted:
                raise LyingSourceError(
                    f"the manifest at {source.manifest_endpoint} has SHA-256 {found}, "
                    f"advertised was {wanted}",
                    source=source.manifest_endpoint,
                )
            signed = parse_signed(data)
            if self._parts.trust is not None:
                self._parts.trust.check(signed)
            self._manifest_data = data
            return signed.manifest

        problems: list[FetchError | VerifyError] = []
        spread = self._parts.spread
        for source in sources if spread is None else spread.in_turn(sources):
            self._parts.between_reads()
            try:
                return read(source)
            except (FetchError, VerifyError) as exc:
                problems.append(exc)
                if spread is not None:
                    spread.note_problem(source.worker_id, exc)
        raise _one_of(problems)

    def fetch_objects(
        self, manifest: Manifest, sources: Sequence[Shard], *, bytes_max: int
    ) -> dict[str, memoryview]:
        """Return every object of a manifest, whole and proven piece by piece.

        Raises:
            FetchError: no source gave a piece, or there is no room for them.
            VerifyError: the objects are larger than ``bytes_max``, or a piece has another hash.
        """
        total = sum(item.num_bytes for item in manifest.objects)
        if total > bytes_max:
            raise VerifyError(f"the payload is {total} bytes; at most {bytes_max} can be right")
        if self._parts.spread is not None:
            return self._parts.spread.fetch(
                Order(
                    manifest=manifest,
                    manifest_data=self._manifest_data,
                    sources=tuple(sources),
                    reader=self._reader,
                    spool=self._spool,
                    read_timeout_s=self._limits.read_timeout_s,
                    between_reads=self._parts.between_reads,
                    on_record=self._parts.on_record,
                )
            )
        objects = {item.object_id: self._spool.open(item.num_bytes) for item in manifest.objects}
        pieces = list(pieces_of(manifest, by_content=self._reader.transport in TRUSTED_TRANSPORTS))
        for _ in self._fetched(pieces, sources, partial(_targets, objects=objects)):
            pass
        return {object_id: data.view.toreadonly() for object_id, data in objects.items()}

    def fetch_chunks(
        self,
        manifest: Manifest,
        sources: Sequence[Shard],
        wanted: Mapping[str, frozenset[int]],
        take: Callable[[ObjectRange, memoryview], None],
    ) -> int:
        """Read some chunks of a manifest's objects, by object; hand each over once it is proven.

        Memory is one window, whatever the objects' sizes. Reads from the advertised sources alone.

        Returns:
            How many bytes were read.

        Raises:
            FetchError: no source gave a chunk.
            VerifyError: one has another hash.
        """
        pieces = list(chunk_pieces(manifest, wanted))
        for targets in self._fetched(pieces, sources, _places):
            for piece, data in targets.values():
                take(piece.wanted, data)
        return sum(piece.wanted.size for piece in pieces)

    def _fetched(
        self,
        pieces: Sequence[Piece],
        sources: Sequence[Shard],
        place: Callable[[Sequence[Piece], memoryview], Mapping[int, Target]],
    ) -> Iterator[Mapping[int, Target]]:
        """Read window after window; what is yielded is proven, and there until the next one."""
        endpoints = self._endpoints(sources)
        size = min(sum(piece.wanted.size for piece in pieces), self._limits.window_bytes)
        with (
            Prover(_provers()) as prover,
            open_session(self._reader, window_bytes=size) as session,
        ):
            tools = Tools(
                reader=session.reader,
                clock=self._parts.clock,
                prover=prover,
                on_record=self._parts.on_record,
            )
            for window in windows_of(pieces, bytes_max=self._limits.window_bytes):
                targets = place(window, session.window)
                piece, memory = targets[0]
                if memory.nbytes < piece.wanted.size:
                    self._fetch_long(tools, piece, memory, endpoints)
                else:
                    self._fetch_window(tools, targets, endpoints)
                yield targets

    def _endpoints(self, sources: Sequence[Shard]) -> Sequence[str]:
        """Return where the sources serve; one that cannot be read from here is left out."""
        found, problems = [], list[FetchError | VerifyError]()
        for source in sources:
            try:
                found.append(self._reader.source_endpoint(source.manifest_endpoint))
            except FetchError as exc:
                problems.append(exc)
        if not found:
            raise _one_of(problems)
        return found

    def _fetch_window(
        self, tools: Tools, targets: Mapping[int, Target], endpoints: Sequence[str]
    ) -> None:
        """Get a window from one source after another until nothing is missing."""
        problems: list[FetchError | VerifyError] = []
        left = dict(targets)
        usable = [each for each in endpoints if each not in self._liars]
        for index, endpoint in enumerate(usable):
            self._parts.between_reads()
            good, found = self._try(tools, left, endpoint, spare=usable[index + 1 :])
            problems += found
            left = {key: target for key, target in left.items() if key not in good}
            if not left:
                return
        raise _one_of(problems)

    def _fetch_long(
        self, tools: Tools, piece: Piece, memory: memoryview, endpoints: Sequence[str]
    ) -> None:
        """Get a piece through memory that is smaller, all of it from one source.

        Until its last byte nothing is proven, so it is nobody's to help out with: who is slow is
        left for another, and waited for if there is no other.
        """
        limits, problems = self._limits, list[FetchError | VerifyError]()
        patience = [limits.read_timeout_s]
        if len(endpoints) > 1:
            patience.insert(0, min(limits.hedge_after_s, limits.read_timeout_s))
        for patience_s, endpoint in product(patience, endpoints):
            if endpoint in self._liars:
                continue
            problem = self._try_long(tools, piece, memory, endpoint, patience_s=patience_s)
            if problem is None:
                return
            problems.append(problem)
        raise _one_of(problems)

    def _try_long(
        self,
        tools: Tools,
        piece: Piece,
        memory: memoryview,
        endpoint: str,
        *,
        patience_s: float,
    ) -> FetchError | VerifyError | None:
        """Read such a piece from one source, and return why that was not possible."""
        stretches = Stretches(piece, memory.nbytes)
        for each in stretches:
            self._parts.between_reads()
            target = (each, memory[: each.wanted.size])
            good, problems = self._try(tools, {0: target}, endpoint, silence_s_max=patience_s)
            if not good:
                return _one_of(problems)
        try:
            stretches.finish()
        except VerifyError as exc:
            self._liars.add(endpoint)
            lie = lying(endpoint, exc, piece.wanted)
            tools.on_record(
                TransferRecord(
                    transport=tools.reader.transport,
                    source=endpoint,
                    num_bytes=0,
                    seconds=0.0,
                    problem=str(lie),
                )
            )
            return lie
        return None

    def _try(
        self,
        tools: Tools,
        targets: Mapping[int, Target],
        endpoint: str,
        *,
        spare: Sequence[str] = (),
        silence_s_max: float | None = None,
    ) -> tuple[set[int], Sequence[FetchError | VerifyError]]:
        """Read from ``endpoint``, and from a spare one too if nothing comes for a while."""
        attempt = Attempt(tools, endpoint, targets)
        rules = WatchRules(
            silence_s_max=silence_s_max or self._limits.read_timeout_s,
            hedge_after_s=self._limits.hedge_after_s,
            timeout_s=self._limits.read_timeout_s * len(targets),
            between_reads=self._parts.between_reads,
        )
        watch = Watch(tools, attempt, targets, spare=spare, rules=rules)
        attempt.run(timeout_s=rules.timeout_s, is_cancelled=watch.is_over)
        good = set(attempt.good)
        attempts = [attempt]
        for hedge in watch.hedges:
            missing = [key for key in targets if key not in good]
            good |= set(hedge.finish(missing if watch.stop is None else ()))
            attempts.append(hedge.attempt)
        no_room = [each.no_room for each in attempts if each.no_room is not None]
        for reason in (watch.stop, *no_room):
            if reason is not None:
                raise reason
        problems = [each.problem for each in attempts if each.problem is not None]
        if not problems and len(good) < len(targets):
            problems = [watch.silence(endpoint)]
        self._liars |= {each.source for each in problems if isinstance(each, LyingSourceError)}
        return good, problems


def _provers() -> int:
    """Return how many threads prove: one core reads."""
    return max(1, min(_PROVERS_MAX, (os.cpu_count() or 1) - 1))


def _targets(
    pieces: Sequence[Piece], window: memoryview, objects: Mapping[str, Spooled]
) -> dict[int, Target]:
    """Give each piece its place in the window; one that is larger comes through all of it."""
    return {
        index: (
            replace(piece, keep=objects[piece.wanted.object_id].write),
            window if room is None else room,
        )
        for index, (piece, room) in enumerate(_rooms(pieces, window))
    }


def _places(pieces: Sequence[Piece], window: memoryview) -> dict[int, Target]:
    """Give each piece its place in the window; what is larger gets memory of its own."""
    return {
        index: (piece, memoryview(bytearray(piece.wanted.size)) if room is None else room)
        for index, (piece, room) in enumerate(_rooms(pieces, window))
    }


def _rooms(
    pieces: Sequence[Piece], window: memoryview
) -> Iterator[tuple[Piece, memoryview | None]]:
    """Yield each piece with its part of the window; None if it is larger than all of that."""
    at = 0
    for piece in pieces:
        size = piece.wanted.size
        if size > len(window):
            yield piece, None
            continue
        yield piece, window[at : at + size]
        at += size


def _one_of(problems: Sequence[FetchError | VerifyError]) -> FetchError | VerifyError:
    if len(problems) == 1:
        return problems[0]
    why = "; ".join(map(str, problems)) or "every source has lied before"
    return FetchError(f"no source answered rightly: {why}")
