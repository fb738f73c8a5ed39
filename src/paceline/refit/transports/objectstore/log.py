"""The commits of one prefix: numbered keys that are each written once, and a hint where they end.

Data is there before the manifest that names it, and the manifest before the commit. Followers
never list: they ask for the next number until there is none.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from paceline.refit.errors import FetchError, PublishError
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX, parse_manifest
from paceline.refit.model import Shard, WeightVersion
from paceline.refit.transports.address import manifest_path, object_path
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.refit.transports.objectstore.commit import (
    COMMIT_BYTES_MAX,
    Commit,
    Committed,
    parse_commit,
    render_commit,
)

log = logging.getLogger(__name__)

_Change = Callable[[tuple[Committed, ...]], tuple[Committed, ...]]

HINT: Final = "v1/head"
_COMMITS: Final = "v1/commits/"
KEPT_COMMITS: Final = 64
"""Older records go: a follower that is further behind starts from the hint."""
_TRIES: Final = 5
GRACE: Final = timedelta(hours=1)
"""What is younger than this is not swept: it may be about to be committed."""


class CommitReader:
    """Finds the newest commit of a prefix; remembers where it was."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._newest: Commit | None = None

    def newest(self) -> Commit:
        """Return the newest commit; number -1 while there is none.

        Raises:
            FetchError: the bucket does not answer, or a record is damaged.
        """
        known = self._newest
        if known is None or self._at(known.number + 1) is None:
            # Also after a long sleep, when the numbers that follow ours are gone.
            hinted = self._from_hint()
            if hinted is not None and (known is None or hinted.number > known.number):
                known = hinted
        following = self._at(0) if known is None else self._at(known.number + 1)
        while following is not None:
            known = following
            following = self._at(known.number + 1)
        self._newest = known
        return known or Commit(number=-1)

    def _from_hint(self) -> Commit | None:
        """Return the commit that the hint names; it proves nothing and may name none."""
        text = self._bucket.read(HINT, size_max=100)
        if text is None or not text.isdigit():
            return None
        return self._at(int(text))

    def _at(self, number: int) -> Commit | None:
        data = self._bucket.read(commit_key(number), size_max=COMMIT_BYTES_MAX)
        return None if data is None else parse_commit(data, number=number)


class CommitLog:
    """The writer of a prefix: one publisher at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._reader = CommitReader(bucket)

    def add(self, version: WeightVersion, shards: Sequence[Shard]) -> Commit:
        """Commit a version whose data and manifests are there; again is fine.

        Raises:
            PublishError: the bucket does not take it, or somebody else writes here.
        """
        entry = Committed(version=version, shards=tuple(shards))

        def change(before: tuple[Committed, ...]) -> tuple[Committed, ...]:
            others = [each for each in before if each.version.uid != version.uid]
            return (*others, entry)

        return self._append(change)

    def drop(self, uids: frozenset[str]) -> Commit:
        """Commit that versions are not to be read any more; again is fine."""
        return self._append(
            lambda before: tuple(each for each in before if each.version.uid not in uids)
        )

    def _append(self, change: _Change) -> Commit:
        for _ in range(_TRIES):
            newest = self._newest()
            versions = change(newest.versions)
            if versions == newest.versions:
                return newest
            commit = Commit(number=newest.number + 1, versions=versions)
            key = commit_key(commit.number)
            try:
                self._bucket.put_new(key, [memoryview(render_commit(commit))])
            except PublishError:
                if self._newest().number <= newest.number:
                    raise  # not overtaken by somebody else: it was not taken
                continue
            self._tidy(commit.number)
            return commit
        raise PublishError(
            f"{self._bucket.url}: others commit here all the time; give each run its own prefix"
        )

    def _newest(self) -> Commit:
        try:
            return self._reader.newest()
        except FetchError as exc:
            raise PublishError(str(exc)) from exc

    def _tidy(self, number: int) -> None:
        """Move the hint, and drop a record that is old; a failure leaves a little more to read."""
        try:
            self._bucket.put_hint(HINT, str(number).encode())
            if number >= KEPT_COMMITS:
                self._bucket.remove(commit_key(number - KEPT_COMMITS))
        except PublishError as exc:
            log.warning("commit %d stands, its hint does not: %s", number, exc)


def sweep(bucket: Bucket, *, now: datetime, grace: timedelta = GRACE) -> Sequence[str]:
    """Remove data and manifests that the newest commit does not name; return their keys.

    What a listing leaves out stays for the next time; what is named is never removed, and what is
    young may be about to be named.

    Raises:
        FetchError, PublishError: the bucket does not answer; what was removed was right.
    """
    named = set(_named(bucket, CommitReader(bucket).newest()))
    gone = [
        item.key
        for prefix in ("v1/objects/", "v1/manifests/")
        for item in bucket.list_keys(prefix)
        if item.key not in named and now - item.modified > grace
    ]
    for key in gone:
        bucket.remove(key)
    return gone


def commit_key(number: int) -> str:
    """Return where a commit is."""
    return f"{_COMMITS}{number:012d}"


def _named(bucket: Bucket, commit: Commit) -> Iterator[str]:
    for item in commit.versions:
        for shard in item.shards:
            key = manifest_path(item.version.uid, shard.source_slot_id).lstrip("/")
            yield key
            data = bucket.read(key, size_max=MANIFEST_BYTES_MAX)
            if data is None:
                raise FetchError(f"{bucket.url}: {key} is committed and not there")
            for found in parse_manifest(data).objects:
                yield object_path(found.object_id).lstrip("/")
