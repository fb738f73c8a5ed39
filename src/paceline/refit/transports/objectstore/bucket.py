"""One prefix of one object store; the only caller of obstore.

Keys are written once: a document by a put that fails if the key is there, a large payload under a
name that is the digest of its bytes. Nothing here relies on a listing to find out what is there;
``list_keys`` is for the sweep alone, which removes what nobody names.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import MemoryStore, from_url

from paceline.core.errors import PreflightError
from paceline.refit.errors import FetchError, PublishError

SCHEMES: Final = ("s3", "gs", "az", "file")
MULTIPART_BYTES_MIN: Final = 64 * 2**20
"""Below this a put is one request, which can be told not to replace anything."""
_PART_BYTES: Final = 16 * 2**20
_FULL: Final = ("(os error 28)", "(os error 122)")
"""ENOSPC and EDQUOT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """How a bucket is reached; what is not said comes from the provider's own environment."""

    config: Mapping[str, str] = field(default_factory=dict)
    """obstore's words for this store, such as ``endpoint``, ``region``, ``access_key_id``."""
    allow_http: bool = False
    """Admit an endpoint without TLS, such as a server on loopback."""
    request_timeout_s: float = 30.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """What a listing says about a key; it may be behind."""

    key: str
    num_bytes: int
    modified: datetime


class Bucket:
    """Safe from several threads."""

    def __init__(self, url: str, *, options: BucketOptions | None = None) -> None:
        """Set up without I/O.

        Args:
            url: ``s3://bucket/prefix``, ``gs://...``, ``az://container/...``, ``file:///folder`` or
                ``memory://any``, which is this object's alone.
            options: endpoint, credentials, patience.

        Raises:
            PreflightError: no such kind of store, or its options do not fit.
        """
        self.url = url.rstrip("/")
        self.options = options or BucketOptions()
        self._store = _open(self.url, self.options)

    def put_new(self, key: str, parts: Sequence[memoryview]) -> None:
        """Write a key that never changes; the same bytes again are fine.

        Raises:
            PublishError: other bytes are there, or the store does not take them.
        """
        size = sum(part.nbytes for part in parts)
        with _refusing(PublishError, f"writing {key}", self.url):
            if size >= MULTIPART_BYTES_MIN:
                self._put_large(key, parts, size)
                return
            data = b"".join(parts)
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                if bytes(obstore.get(self._store, key).bytes()) != data:
                    raise PublishError(
                        f"{self.url}/{key} holds something else already; what is published never "
                        "changes, use another prefix or run"
                    ) from None

    def copy_new(self, source: str, key: str) -> None:
        """Show a key's bytes under another one too; the store copies. Raises PublishError."""
        with _refusing(PublishError, f"copying to {key}", self.url):
            obstore.copy(self._store, source, key)

    def put_hint(self, key: str, data: bytes) -> None:
        """Replace a key that only helps to find others. Raises PublishError."""
        with _refusing(PublishError, f"writing {key}", self.url):
            obstore.put(self._store, key, data, use_multipart=False)

    def read(self, key: str, *, size_max: int) -> bytes | None:
        """Return a small key's bytes; None if it is not there.

        Raises:
            FetchError: it is larger, or the store does not answer.
        """
        with _refusing(FetchError, f"reading {key}", self.url):
            try:
                found = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            if found.meta["size"] > size_max:
                raise FetchError(f"{key} has {found.meta['size']} bytes, over {size_max}")
            return bytes(found.bytes())

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes of a key. Raises FetchError."""
        with _refusing(FetchError, f"reading {key}", self.url):
            try:
                found = obstore.get_range(self._store, key, start=start, end=stop)
            except FileNotFoundError:
                raise FetchError(f"{key} is not there (any more)") from None
            data = memoryview(found)
            if len(data) != stop - start:
                raise FetchError(f"{key} ends after {start + len(data)} bytes")
            return data

    def size_of(self, key: str) -> int | None:
        """Return how long a key is; None if it is not there. Raises FetchError."""
        with _refusing(FetchError, f"asking for {key}", self.url):
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                return None

    def remove(self, key: str) -> None:
        """Delete a key; idempotent. Raises PublishError."""
        with _refusing(PublishError, f"removing {key}", self.url):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    def list_keys(self, prefix: str) -> Iterator[StoredKey]:
        """Yield what the store lists; new keys may be missing. Raises FetchError."""
        with _refusing(FetchError, f"listing {prefix}", self.url):
            for page in obstore.list(self._store, prefix):
                for meta in page:
                    yield StoredKey(
                        key=meta["path"], num_bytes=meta["size"], modified=meta["last_modified"]
                    )

    def _put_large(self, key: str, parts: Sequence[memoryview], size: int) -> None:
        """Upload in parts; the key is a digest, so whoever else writes it writes the same."""
        try:
            there: int | None = obstore.head(self._store, key)["size"]
        except FileNotFoundError:
            there = None
        if there == size:
            return
        if there is not None:
            raise PublishError(f"{self.url}/{key} has {there} bytes instead of {size}")
        obstore.put(self._store, key, _slices(parts), use_multipart=True, chunk_size=_PART_BYTES)


def _open(url: str, options: BucketOptions) -> Any:
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore()
    if scheme not in SCHEMES:
        raise PreflightError(
            f"{url[:200]!r} is no bucket; write s3://, gs://, az:// or file:// and a prefix"
        )
    try:
        make: Any = from_url  # typed per kind of store; ours is known when it runs
        if scheme == "file":
            return make(url, mkdir=True)
        return make(
            url,
            config=dict(options.config),
            client_options={
                "allow_http": options.allow_http,
                "timeout": f"{options.request_timeout_s:g}s",
                "connect_timeout": "5s",
            },
            retry_config={
                "max_retries": options.retries,
                "retry_timeout": timedelta(seconds=options.request_timeout_s),
            },
        )
    except (BaseError, ValueError, OSError) as exc:
        raise PreflightError(f"{url} cannot be used: {_first_line(exc)}") from exc


def _slices(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    flat = (part.cast("B") for part in parts if part.nbytes)
    return itertools.chain.from_iterable(
        (part[at : at + _PART_BYTES] for at in range(0, len(part), _PART_BYTES)) for part in flat
    )


@contextmanager
def _refusing(error: type[FetchError] | type[PublishError], what: str, url: str) -> Iterator[None]:
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as exc:
        raise error(
            f"{url} does not let us in while {what}: {_first_line(exc)}; check the credentials"
        ) from exc
    except InvalidPathError as exc:
        raise error(f"{what}: {_first_line(exc)}") from exc
    except (BaseError, OSError) as exc:
        # The library has no error of its own for a disk without room; the system's text is inside.
        is_full = any(word in str(exc) for word in _FULL)
        advice = (
            "it has no room left: remove folders of old versions or runs there, or take another "
            "bucket; nothing of this is visible"
            if is_full
            else "try again later"
        )
        raise error(f"{url} failed {what}: {_first_line(exc)}; {advice}") from exc


def _first_line(exc: BaseException) -> str:
    """Return the sentence of an error; what follows is the library's inside."""
    return (str(exc).splitlines() or [type(exc).__name__])[0][:500]
