"""Several transports as one: publishers serve through all, readers take the best that works.

One address names several ways to the same bytes. A way that fails is left alone for a while, so
that a run between two clouds does not pay for NIXL's timeout with every window.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from paceline.core.clock import Clock
from paceline.refit.errors import FetchError, PublishError
from paceline.refit.model import Shard, WeightVersion, WeightVersionShardManifest
from paceline.refit.transports.address import join_addresses, scheme_of, split_addresses
from paceline.refit.transports.protocol import (
    ManifestDoor,
    ObjectReader,
    ObjectServer,
    Part,
    ReadPlan,
    ReadSession,
    SupportsCheckpoints,
    SupportsCommits,
    SupportsLanding,
    SupportsReplace,
    SupportsSessions,
    Terms,
    TransferRecord,
    open_session,
    read_parts,
)

LEFT_ALONE_S = 30.0
NO_STORE_OF_FILES = (
    "FULL_HF_CHECKPOINT is written to a bucket: add objectstore to refit.transports, "
    "and refit.bucket"
)
_T = TypeVar("_T")


class Source(ObjectServer, ManifestDoor, Protocol):
    """A server of objects and manifests."""


class SeveralServers:
    """Signs ObjectServer and the publisher's port; what one of them refuses, none serves."""

    def __init__(self, servers: Sequence[Source]) -> None:
        """Serve through all of ``servers``, the best first; they are closed with this."""
        if not servers:
            raise ValueError("at least one transport is needed")
        self._servers = tuple(servers)

    @property
    def transport(self) -> str:
        """The name of the best one."""
        return self._servers[0].transport

    @property
    def endpoint(self) -> str:
        """All endpoints, the best first."""
        return join_addresses(server.endpoint for server in self._servers)

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Serve through every transport, or through none. Raises PublishError."""
        for index, server in enumerate(self._servers):
            try:
                server.serve_object(object_id, parts)
            except BaseException:
                for before in self._servers[:index]:
                    before.withdraw_object(object_id)
                raise

    def replace_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Serve the same bytes from other memory everywhere.

        Raises:
            PublishError: one of them has told readers where the old memory is.
            StagingError: a reader does not leave the old memory.
        """
        for server in self._servers:
            if not isinstance(server, SupportsReplace):
                raise PublishError(
                    f"readers over {server.transport} know where the weights lie: nothing can be "
                    "served from elsewhere; let steps wait (in_place: wait)"
                )
        for server in self._servers:
            if isinstance(server, SupportsReplace):
                server.replace_object(object_id, parts)

    def withdraw_object(self, object_id: str) -> None:
        """Withdraw it everywhere; idempotent."""
        for server in self._servers:
            server.withdraw_object(object_id)

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Publish through every transport, or through none; one address names them all."""
        addresses: list[str] = []
        try:
            for server in self._servers:
                address = server.publish_manifest(
                    version_id=version_id, source_slot_id=source_slot_id, manifest=manifest
                )
                addresses.append(address)
        except BaseException:
            for before in self._servers[: len(addresses)]:
                before.release_manifest(version_id=version_id, source_slot_id=source_slot_id)
            raise
        return join_addresses(addresses)

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Release it everywhere; idempotent."""
        for server in self._servers:
            server.release_manifest(version_id=version_id, source_slot_id=source_slot_id)

    def commit_version(self, version: WeightVersion, shards: Sequence[Shard]) -> None:
        """Commit it wherever readers may have no other way to learn of it."""
        for server in self._servers:
            if isinstance(server, SupportsCommits):
                server.commit_version(version, shards)

    def retire_version(self, uid: str) -> None:
        """Say there that it goes."""
        for server in self._servers:
            if isinstance(server, SupportsCommits):
                server.retire_version(uid)

    def checkpoint_url(self, folder: str) -> str:
        """Return where the index of a checkpoint is going to be. Raises PublishError."""
        return self._store_of_files().checkpoint_url(folder)

    def publish_checkpoint(
        self, folder: str, files: Mapping[str, str], documents: Mapping[str, bytes]
    ) -> None:
        """Show the files where there are files. Raises PublishError."""
        self._store_of_files().publish_checkpoint(folder, files, documents)

    def _store_of_files(self) -> SupportsCheckpoints:
        for server in self._servers:
            if isinstance(server, SupportsCheckpoints):
                return server
        raise PublishError(NO_STORE_OF_FILES)

    def close(self) -> None:
        """Close all; idempotent."""
        for server in self._servers:
            server.close()


class SeveralReaders:
    """Signs ObjectReader over readers by the schemes that they read."""

    def __init__(self, readers: Mapping[str, ObjectReader], *, clock: Clock) -> None:
        """Read through ``readers``: scheme -> reader, the preferred first; closed with this."""
        self._readers = dict(readers)
        self._clock = clock
        self._failed_at: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def transport(self) -> str:
        """The name of the only one; of several, each record says which one moved its bytes."""
        names = {reader.transport for reader in self._readers.values()}
        return names.pop() if len(names) == 1 else "several"

    def plan_read(self, endpoint: str, parts: Sequence[Part], *, timeout_s: float) -> ReadPlan:
        """Plan to read through the first way that works, and on through the next if it breaks."""
        ways = self._ways(endpoint)
        if len(ways) == 1:
            reader, single = ways[0]
            return reader.plan_read(single, parts, timeout_s=timeout_s)
        return _SeveralRead(self, ways, endpoint, parts)

    def read_manifest(self, address: str, *, size_max: int, timeout_s: float) -> bytes:
        """Return the manifest through the first way that works. Raises FetchError."""
        ways = self._ways(address)
        return self.first_of(
            ways,
            lambda reader, single: reader.read_manifest(
                single, size_max=size_max, timeout_s=timeout_s / len(ways)
            ),
        )

    def source_endpoint(self, address: str) -> str:
        """Return the endpoints behind an address that can be read here; no I/O."""
        return join_addresses(
            reader.source_endpoint(single) for reader, single in self._known(address)
        )

    @contextmanager
    def session(self, *, window_bytes: int) -> Iterator[ReadSession]:
        """Yield a session of the first reader that has its own; the others read as ever."""
        readers = list(self._readers.values())
        able = next((each for each in readers if isinstance(each, SupportsSessions)), readers[0])
        with open_session(able, window_bytes=window_bytes) as inner:
            found = SeveralReaders(
                {
                    scheme: inner.reader if each is able else each
                    for scheme, each in self._readers.items()
                },
                clock=self._clock,
            )
            found._failed_at = self._failed_at
            yield ReadSession(reader=found, window=inner.window)

    def can_land(self, memory: memoryview) -> bool:
        """Say whether reads may go into a mapped file, for those that gain by it."""
        able = [each for each in self._readers.values() if isinstance(each, SupportsLanding)]
        return bool(able) and all(each.can_land(memory) for each in able)

    def close(self) -> None:
        """Close all; idempotent."""
        for reader in set(self._readers.values()):
            reader.close()

    def first_of(
        self, ways: Sequence[tuple[ObjectReader, str]], use: Callable[[ObjectReader, str], _T]
    ) -> _T:
        """Return what the first way gives that does not fail. Raises the last FetchError."""
        problem: FetchError | None = None
        for reader, single in ways:
            try:
                return use(reader, single)
            except FetchError as exc:
                problem = exc
                self.note_failure(single)
        assert problem is not None  # noqa: S101 - there is at least one way
        raise problem

    def note_failure(self, single: str) -> None:
        """Leave a way alone for a while."""
        with self._lock:
            self._failed_at[_host(single)] = self._clock.monotonic()

    def _ways(self, text: str) -> Sequence[tuple[ObjectReader, str]]:
        """Return the ways to try, those that failed lately last."""
        now_s = self._clock.monotonic()
        with self._lock:
            lame = {host for host, at in self._failed_at.items() if now_s - at < LEFT_ALONE_S}
        return sorted(self._known(text), key=lambda way: _host(way[1]) in lame)

    def _known(self, text: str) -> Sequence[tuple[ObjectReader, str]]:
        by_scheme = {scheme_of(single): single for single in reversed(split_addresses(text))}
        found = [
            (reader, by_scheme[scheme])
            for scheme, reader in self._readers.items()
            if scheme in by_scheme
        ]
        if not found:
            raise FetchError(
                f"{text[:200]!r} is served over {', '.join(sorted(by_scheme)) or 'nothing'}; this "
                f"process reads {', '.join(self._readers)}: configure one that both have"
            )
        return found


class _SeveralRead:
    """Signs ReadPlan: what one way did not bring comes through the next."""

    def __init__(
        self,
        owner: SeveralReaders,
        ways: Sequence[tuple[ObjectReader, str]],
        endpoint: str,
        parts: Sequence[Part],
    ) -> None:
        self._owner = owner
        self._ways = ways
        self._endpoint = endpoint
        self._parts = tuple(parts)

    @property
    def source(self) -> str:
        return self._endpoint

    @property
    def num_bytes(self) -> int:
        return sum(part.wanted.size for part in self._parts)

    def run(self, terms: Terms) -> TransferRecord:
        missing = dict(enumerate(self._parts))
        tries = 0

        def move(reader: ObjectReader, single: str) -> TransferRecord:
            nonlocal tries
            keys = list(missing)
            tries += 1

            def on_part(index: int) -> None:
                del missing[keys[index]]
                terms.on_part(keys[index])

            # A way that hangs must leave time for the next.
            share_s = terms.timeout_s / len(self._ways)
            own = Terms(timeout_s=share_s, is_cancelled=terms.is_cancelled, on_part=on_part)
            return read_parts(reader, single, [missing[key] for key in keys], own)

        try:
            record = self._owner.first_of(self._ways, move)
        except FetchError as exc:
            exc.source = self._endpoint
            raise
        return replace(
            record,
            source=self._endpoint,
            num_bytes=self.num_bytes,
            retries=record.retries + tries - 1,
        )

    def close(self) -> None:
        """Nothing is held between runs."""


def _host(single: str) -> str:
    """Return scheme and host of an address or endpoint: what a failure is remembered under."""
    scheme, _, rest = single.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
