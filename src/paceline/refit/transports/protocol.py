"""What a transport signs: serve immutable objects, read ranges of them into our buffers.

An object is one immutable byte string with an id that is a digest of its content. Which bytes
of which object are needed is the plan's business; a transport only moves them. It verifies
nothing beyond lengths: the receiver checks hashes, whoever the source was.

A source is registered once: ``serve_object`` makes staged buffers readable where they lie, and
``publish_manifest`` returns the address that readers are told. Reading is planned once and run as
often as wanted: ``plan_read`` finds out where the bytes are and pins the caller's buffers,
``ReadPlan.run`` moves them. Whoever needs several sources makes a plan for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from paceline.refit.model import ObjectRange, Shard, WeightVersion, WeightVersionShardManifest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A range of an object, and the buffer of the caller's that it goes to."""

    wanted: ObjectRange
    target: memoryview
    """Writable, flat, exactly ``wanted.size`` bytes."""

    def __post_init__(self) -> None:
        if self.target.nbytes != self.wanted.size:
            raise ValueError(f"target has {self.target.nbytes} bytes, the range {self.wanted.size}")


def _never() -> bool:
    return False


def _ignore(index: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long one run may take, who may end it, and who is told of progress."""

    timeout_s: float
    """For the whole run."""
    is_cancelled: Callable[[], bool] = _never
    """Asked often; once it says yes the run ends soon, and writes nothing after it has ended."""
    on_part: Callable[[int], None] = _ignore
    """Told the index of each part whose bytes are all there, once, from any thread. What it was
    told stays true if the run fails later. It takes no longer than a hash, and does not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """What one run did: a line of the report."""

    transport: str
    source: str
    num_bytes: int
    seconds: float
    retries: int = 0
    """How often the transfer was cut or refused and taken up again."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by the transport's own words, such as ``plan`` and ``move``."""
    problem: str = ""
    """Why it did not arrive whole; empty if it did."""

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 where no time passed."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


class ReadPlan(Protocol):
    """Parts of one source, ready to be moved. One run at a time; close it when done."""

    @property
    def source(self) -> str:
        """The endpoint that the bytes come from."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        ...

    def run(self, terms: Terms) -> TransferRecord:
        """Fill every part's target; may be run again, for instance when targets are reused.

        Raises:
            FetchError: the source is gone, does not have an object, sent too little or too much,
                or the time passed; it names source and range. Targets of parts that were not told
                of may then hold anything.
            TransferCancelledError: ``is_cancelled`` said so.
        """
        ...

    def close(self) -> None:
        """Let the buffers go; idempotent, and never while a run is going on."""
        ...


class ObjectServer(Protocol):
    """The source side; lives in the process that owns the bytes. Safe from several threads."""

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        ...

    @property
    def endpoint(self) -> str:
        """Where readers reach this server, e.g. ``http://10.0.0.5:40123``."""
        ...

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Make the concatenation of ``parts`` readable, without copying it where that is possible.

        The buffers must not change or go away until ``withdraw_object`` returned. Idempotent
        for the same id.

        Raises:
            PublishError: it cannot be made readable; nothing is left behind.
        """
        ...

    def withdraw_object(self, object_id: str) -> None:
        """Stop serving; returns when no reader is inside the buffers. Idempotent.

        Only when no lease lives: where readers read memory one-sidedly, the leases alone say
        whether one is inside.
        """
        ...

    def close(self) -> None:
        """Stop the server; idempotent."""
        ...


@runtime_checkable
class SupportsLoad(Protocol):
    """A server that knows how many reads it answers now."""

    @property
    def num_readers(self) -> int:
        """How many reads of objects are inside."""
        ...


@runtime_checkable
class SupportsReplace(Protocol):
    """A server that can go on serving an object from a copy of its bytes."""

    def replace_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Serve the same bytes from other memory; returns when nobody reads the old one.

        Does nothing for an object that is not served. Raises StagingError if a reader stays.
        """
        ...


class ManifestDoor(Protocol):
    """Serves small documents: what transports that move no documents of their own stand on.

    Every server of manifests is one; see WeightVersionShardManifestPublisher for the methods.
    """

    @property
    def endpoint(self) -> str:
        """Where readers reach it."""
        ...

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Serve a document and return its address."""
        ...

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Stop serving it; idempotent."""
        ...

    def close(self) -> None:
        """Stop the server; idempotent."""
        ...


@runtime_checkable
class SupportsCommits(Protocol):
    """A server whose readers may have no other way to learn which versions there are."""

    def commit_version(self, version: WeightVersion, shards: Sequence[Shard]) -> None:
        """Say that a version is READY; its data and manifests are served. Idempotent.

        Raises:
            PublishError: nobody was told; the next commit tells of this one too.
        """
        ...

    def retire_version(self, uid: str) -> None:
        """Say that a version goes, before its data does. Idempotent. Raises PublishError."""
        ...


CHECKPOINT_INDEX = "model.safetensors.index.json"
"""What every reader of a checkpoint opens first."""


@runtime_checkable
class SupportsCheckpoints(Protocol):
    """A server of a store in which objects can also be files of a checkpoint."""

    def checkpoint_url(self, folder: str) -> str:
        """Return where the index of a checkpoint is going to be. Raises PublishError."""
        ...

    def publish_checkpoint(
        self, folder: str, files: Mapping[str, str], documents: Mapping[str, bytes]
    ) -> None:
        """Show served objects as files, by name, beside documents; visible whole or not at all.

        Raises:
            PublishError: the store does not take it.
        """
        ...


class ObjectReader(Protocol):
    """The reading side of one transport. Safe from several threads."""

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        ...

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Find out how the parts are read from the source at ``endpoint``; moves none of them.

        Parts may be of several objects. Ranges that follow one another in one object, in the
        order given, are moved together.

        Raises:
            FetchError: the source does not answer in time or does not have an object. A transport
                that needs to ask nothing leaves that to the run.
        """
        ...

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest at an advertised address. Raises FetchError."""
        ...

    def source_endpoint(self, address: str) -> str:
        """Return the ``endpoint`` of the object server behind a manifest address; no I/O.

        Raises:
            FetchError: this transport does not read there.
        """
        ...

    def close(self) -> None:
        """Give connections back; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadSession:
    """What one fetch reads with, plan after plan."""

    reader: ObjectReader
    window: memoryview
    """Writable memory of this session alone, of any content: reads into it cost least."""


@runtime_checkable
class SupportsSessions(Protocol):
    """A reader that does for a fetch what would otherwise be done for each of its plans."""

    def session(self, *, window_bytes: int) -> AbstractContextManager[ReadSession]:
        """Yield a session with a window of so many bytes; its plans are closed before it ends.

        What it was told about a source's objects it may take to be so until it ends: whoever
        reads in a session holds a lease.
        """
        ...


@contextmanager
def open_session(reader: ObjectReader, *, window_bytes: int) -> Iterator[ReadSession]:
    """Yield the reader's own session, or the reader itself with plain memory."""
    if isinstance(reader, SupportsSessions):
        with reader.session(window_bytes=window_bytes) as found:
            yield found
    else:
        yield ReadSession(reader=reader, window=memoryview(bytearray(window_bytes)))


def read_parts(
    reader: ObjectReader, endpoint: str, parts: Sequence[Part], terms: Terms
) -> TransferRecord:
    """Plan and run once; see ``plan_read`` and ``run`` for what is raised."""
    plan = reader.plan_read(endpoint, parts, timeout_s=terms.timeout_s)
    try:
        return plan.run(terms)
    finally:
        plan.close()


def read_object(
    reader: ObjectReader,
    endpoint: str,
    wanted: ObjectRange,
    target: memoryview,
    *,
    timeout_s: float,
) -> TransferRecord:
    """Read one range into ``target``. Raises FetchError."""
    part = Part(wanted=wanted, target=target)
    return read_parts(reader, endpoint, [part], Terms(timeout_s=timeout_s))
