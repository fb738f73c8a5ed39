"""The embedded store: one sqlite file, shared by the threads and processes of one computer.

Sqlite does the locking and the durability. Three choices around it:

- A new file is made complete under another name and then linked into place, so that nobody
  ever opens half a store and two processes that start together end up with the same one.
- Keys are kept as UTF-8 bytes. Their order is the order of code points, and everything under
  a prefix is one range of the primary key.
- One counter hands out revisions for all keys, so that none returns after a delete.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.clock import Clock
from paceline.store.protocol import ABSENT, ConflictError, Record, StoreError

_APPLICATION_ID = 0x50434C4E
_SCHEMA = 1
_CREATE = (
    "PRAGMA journal_mode = WAL;"
    "PRAGMA synchronous = FULL;"
    "CREATE TABLE record"
    " (key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE counter (last_revision INTEGER NOT NULL);"
    "INSERT INTO counter VALUES (0);"
)
_MARK = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_SCHEMA};"


class SqliteStore:
    """Records in one file of mode 0600; what a commit wrote outlives kill -9 and power loss."""

    def __init__(self, path: Path, *, clock: Clock, busy_timeout_s: float = 10.0) -> None:
        self._path = path
        self._clock = clock
        # Held through a group, in which this thread goes on reading and committing.
        self._lock = threading.RLock()
        self._is_group = self._is_broken = False
        self._connection: sqlite3.Connection | None = None
        with self._our_errors():
            _ensure_file(path)
            self._connection = sqlite3.connect(
                path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.execute("PRAGMA synchronous = FULL")
                _refuse_foreign(self._connection, path)
            except BaseException:
                self.close()
                raise

    def now_ms(self) -> int:
        """Return Unix milliseconds of the clock that was handed in."""
        return int(self._clock.time() * 1000)

    def get(self, key: str) -> Record | None:
        """Return the record, or None."""
        with self._use() as connection:
            row = connection.execute(
                "SELECT value, revision FROM record WHERE key = ?", (key.encode(),)
            ).fetchone()
        return Record(key=key, value=row[0], revision=row[1]) if row else None

    def list(self, prefix: str) -> Sequence[Record]:
        """Return all records under ``prefix``, sorted by key, as one snapshot."""
        where, bounds = _range_of(prefix.encode())
        with self._use() as connection:
            rows = connection.execute(
                f"SELECT key, value, revision FROM record {where} ORDER BY key",  # noqa: S608 - one of two constants
                bounds,
            ).fetchall()
        return [Record(key=row[0].decode(), value=row[1], revision=row[2]) for row in rows]

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Write everything or nothing; on disk when it returns."""
        with self._use() as connection:
            # IMMEDIATE: the write lock is taken before anything is read, so no commit can
            # find out half-way that another process was quicker.
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            for key, revision in expect.items():
                _refuse_moved(connection, key, revision)
            _write(connection, writes)
            if not self._is_group:
                connection.execute("COMMIT")

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Write the commits inside to disk together: one wait for the disk instead of many."""
        with self._lock:
            self._is_group, self._is_broken = True, False
            try:
                yield
                with self._our_errors():
                    if self._is_broken:
                        raise StoreError(f"store {self._path}: a write failed; none was kept")
                    if self._connection is not None and self._connection.in_transaction:
                        self._connection.execute("COMMIT")
            finally:
                self._is_group = False
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Give the file back; idempotent."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection; leave no transaction open, whatever happens inside."""
        with self._lock, self._our_errors():
            if self._connection is None:
                raise StoreError(f"store {self._path} is closed; open it again before using it")
            try:
                yield self._connection
            except sqlite3.Error:
                # What the group has written so far can no longer be relied on.
                self._is_broken = True
                raise
            finally:
                if self._connection.in_transaction and not self._is_group:
                    self._connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _our_errors(self) -> Iterator[None]:
        """Turn what sqlite and the file system raise into StoreError, in this one place."""
        try:
            yield
        except sqlite3.Error as exc:
            raise StoreError(f"store {self._path}: {_advice(exc)} ({exc})") from exc
        except OSError as exc:
            raise StoreError(
                f"store {self._path} cannot be created or opened: {exc.strerror}; free the disk, "
                "mend the permissions or point PACELINE_STATE_DIR elsewhere"
            ) from exc


def _refuse_foreign(connection: sqlite3.Connection, path: Path) -> None:
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    if application_id != _APPLICATION_ID or schema != _SCHEMA:
        raise StoreError(
            f"{path} is not a Paceline store of schema {_SCHEMA} (application id "
            f"{application_id:#x}, schema {schema}); it was left alone. Use the Paceline that "
            "made it, or point PACELINE_STATE_DIR elsewhere"
        )


def _ensure_file(path: Path) -> None:
    """Leave a complete, private store at ``path``, ours or the one that was there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _create_file(path)
    elif path.is_file() and path.stat().st_size == 0:  # never made so by us
        raise StoreError(
            f"store {path} is empty: what was on record is lost, and machines may still run. Move "
            "the file away, then look at every provider with `paceline gc`"
        )
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _create_file(path: Path) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    draft.unlink(missing_ok=True)  # of a killed process that had our number
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.executescript(_CREATE + _MARK)
        # Somebody else's complete store is as good as ours.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _range_of(prefix: bytes) -> tuple[str, tuple[bytes, ...]]:
    """Return the WHERE clause for all keys under ``prefix``; UTF-8 never holds a byte 0xff."""
    if not prefix:
        return "", ()
    after = prefix[:-1] + bytes([prefix[-1] + 1])
    return "WHERE key >= ? AND key < ?", (prefix, after)


def _refuse_moved(connection: sqlite3.Connection, key: str, expected: int) -> None:
    row = connection.execute(
        "SELECT revision FROM record WHERE key = ?", (key.encode(),)
    ).fetchone()
    found = row[0] if row else ABSENT
    if found != expected:
        raise ConflictError(f"{key}: expected revision {expected}, found {found}; read it again")


def _write(connection: sqlite3.Connection, writes: Mapping[str, bytes | None]) -> None:
    if not writes:
        return
    revision = connection.execute(
        "UPDATE counter SET last_revision = last_revision + 1 RETURNING last_revision"
    ).fetchone()[0]
    for key, value in writes.items():
        if value is None:
            connection.execute("DELETE FROM record WHERE key = ?", (key.encode(),))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO record VALUES (?, ?, ?)", (key.encode(), value, revision)
            )


_ADVICE = {
    sqlite3.SQLITE_BUSY: "locked by another process for too long; end it or try again",
    sqlite3.SQLITE_LOCKED: "locked by another process for too long; end it or try again",
    sqlite3.SQLITE_FULL: "the disk is full and nothing was written; free some space",
    sqlite3.SQLITE_CORRUPT: "damaged; move the file away and keep it, its machines may still run",
    sqlite3.SQLITE_NOTADB: "not a store; move the file away or point PACELINE_STATE_DIR elsewhere",
    sqlite3.SQLITE_READONLY: "not writable; mend the permissions of the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; mend the permissions of the file and its directory",
    sqlite3.SQLITE_PERM: "not writable; mend the permissions of the file and its directory",
    sqlite3.SQLITE_IOERR: "reading or writing failed; look for a full or failing disk",
    sqlite3.SQLITE_TOOBIG: "a value is larger than sqlite takes; nothing was written",
}


def _advice(exc: sqlite3.Error) -> str:
    """Return what to do about ``exc``, by its primary result code."""
    code = getattr(exc, "sqlite_errorcode", None)
    return _ADVICE.get((code or 0) & 0xFF, "sqlite failed; nothing was written")
