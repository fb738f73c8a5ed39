"""One source's try at some pieces: they are proven as they arrive, while others travel."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.refit.errors import (
    FetchError,
    LyingSourceError,
    NoRoomError,
    TransferCancelledError,
    VerifyError,
)
from paceline.refit.model import ObjectRange
from paceline.refit.receiver.pieces import Target
from paceline.refit.receiver.prover import Prover
from paceline.refit.transports.protocol import (
    ObjectReader,
    Part,
    Terms,
    TransferRecord,
    read_parts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every attempt of a fetch works with."""

    reader: ObjectReader
    clock: Clock
    prover: Prover
    on_record: Callable[[TransferRecord], None]


def lying(endpoint: str, found: VerifyError, wanted: ObjectRange) -> LyingSourceError:
    """Return the blame for a source of other bytes than it should have."""
    return LyingSourceError(f"{endpoint} is to be avoided: {found}", source=endpoint, wanted=wanted)


class Attempt:
    """Reads pieces from one source; what it found good stays good if it fails later."""

    def __init__(self, tools: Tools, endpoint: str, targets: Mapping[int, Target]) -> None:
        self._tools = tools
        self._endpoint = endpoint
        self._targets = targets
        self._keys = list(targets)
        self._proofs: dict[int, Future[None]] = {}
        self.problem: FetchError | VerifyError | None = None
        self.no_room: NoRoomError | None = None
        """Why what came could not be kept, which is nobody's fault."""
        self.last_at = tools.clock.monotonic()
        """When the last piece arrived."""

    def run(self, *, timeout_s: float, is_cancelled: Callable[[], bool]) -> None:
        """Read everything; why that was not possible is in ``problem`` afterwards."""
        self.last_at = started = self._tools.clock.monotonic()
        parts = [
            Part(wanted=piece.wanted, target=target) for piece, target in self._targets.values()
        ]
        terms = Terms(timeout_s=timeout_s, is_cancelled=is_cancelled, on_part=self._on_part)
        try:
            record = read_parts(self._tools.reader, self._endpoint, parts, terms)
        except (FetchError, TransferCancelledError) as exc:
            if isinstance(exc, FetchError):
                self.problem = exc
            record = TransferRecord(
                transport=self._tools.reader.transport,
                source=self._endpoint,
                num_bytes=sum(self._targets[key][0].wanted.size for key in self._proofs),
                seconds=self._tools.clock.monotonic() - started,
                problem=str(exc),
            )
        moved_at = self._tools.clock.monotonic()
        self._settle()
        proof_s = self._tools.clock.monotonic() - moved_at
        if self.problem is not None and not record.problem:
            record = replace(record, problem=str(self.problem))
        self._tools.on_record(replace(record, stages={**record.stages, "prove": proof_s}))

    @property
    def good(self) -> Sequence[int]:
        """The pieces that arrived and are proven by now."""
        return [
            key
            for key, proof in list(self._proofs.items())
            if proof.done() and proof.exception() is None
        ]

    @property
    def missing(self) -> Sequence[int]:
        """The others."""
        good = set(self.good)
        return [key for key in self._keys if key not in good]

    def _on_part(self, index: int) -> None:
        key = self._keys[index]
        piece, target = self._targets[key]
        self._proofs[key] = self._tools.prover.submit(piece.settle, target)
        self.last_at = self._tools.clock.monotonic()

    def _settle(self) -> None:
        """Wait for the proofs, and blame the source for a piece that is not what it should be."""
        for key, proof in self._proofs.items():
            try:
                proof.result()
            except VerifyError as exc:
                self.problem = lying(self._endpoint, exc, self._targets[key][0].wanted)
            except NoRoomError as exc:
                self.no_room = exc


class Hedge:
    """A second source's try at pieces that do not come from the first, into buffers of its own."""

    def __init__(
        self, tools: Tools, endpoint: str, targets: Mapping[int, Target], *, timeout_s: float
    ) -> None:
        """Start reading in a thread."""
        self._targets = targets
        self._own = {
            key: (piece, memoryview(bytearray(piece.wanted.size)))
            for key, (piece, _) in targets.items()
        }
        self._is_cancelled = threading.Event()
        self.attempt = Attempt(tools, endpoint, self._own)
        self._thread = threading.Thread(
            target=self.attempt.run,
            kwargs={"timeout_s": timeout_s, "is_cancelled": self._is_cancelled.is_set},
            name="paceline-hedge",
            daemon=True,
        )
        self._thread.start()

    def has(self, keys: Sequence[int]) -> bool:
        """Say whether all of these are proven here."""
        return set(keys) <= set(self.attempt.good)

    def finish(self, missing: Sequence[int]) -> Sequence[int]:
        """End it, waiting for what is missing; copy that to its place and return what it was."""
        if not missing:
            self._is_cancelled.set()
        self._thread.join()
        found = [key for key in missing if key in set(self.attempt.good)]
        for key in found:
            self._targets[key][1][:] = self._own[key][1]
        return found
