"""Checkpoints in an object store: sent from where they are made, fetched where they are needed.

    <url>/<run>/<slot>/data/<root>/<time>-<name>/<file>      bytes
    <url>/<run>/<slot>/commits/<root>/<time>-<name>.json     the manifest, written last

What has no manifest does not exist: a machine that dies in the middle of sending leaves bytes that
nobody reads and the next sending overwrites. Pruning takes the manifest away first. What is fetched
is compared with its manifest, file by file, before it appears under its name.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from paceline.core.errors import PreflightError, UsageError
from paceline.runs.checkpoints import (
    Checkpoint,
    parse_manifest,
    plan_fetches,
    plan_prune,
    plan_resume,
    render_manifest,
    resume_path,
)
from paceline.runs.shelf import MANIFEST_BYTES_MAX, digest_of

COMMITS_MAX = 10_000
FETCHING = ".fetching"
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What became of checkpoints that were to be sent, and of older ones there; by key."""

    sent: Sequence[str]
    skipped: Sequence[str]
    """There already, older than what is kept, or still being written."""
    pruned: Sequence[str]


class CheckpointStore:
    """The checkpoints of one slot of a run, at one URL."""

    def __init__(self, url: str, *, run_id: str, slot: str) -> None:
        """Prepare; nothing is sent. Raises UsageError for a URL that names no store."""
        self._prefix = f"{run_id}/{slot}"
        self._told = f"{url.partition('://')[0]} object store"
        try:
            is_local = url.startswith("file:")
            self._store: Any = from_url(url, mkdir=True) if is_local else from_url(url)
        except (BaseError, ValueError) as exc:
            raise UsageError(f"artifacts.to names no object store: {_first_line(exc)}") from exc

    def kept(self) -> dict[str, Checkpoint]:
        """Return every committed checkpoint by its key."""
        return {key: one for key, (one, _) in self._manifests().items()}

    def push(self, found: Sequence[Checkpoint], *, base: Path, keep: int) -> Pushed:
        """Send what is new of ``found``, files below ``base``, the newest first; then prune.

        One whose files change meanwhile is left for the next time.
        """
        kept = self.kept()
        sent: list[str] = []
        for one in plan_fetches(found, kept=list(kept.values()), keep=keep):
            digests = self._send(one, base / one.source)
            if digests is not None:
                manifest = render_manifest(one, digests=digests).encode()
                with self._asking("commit a checkpoint"):
                    obstore.put(self._store, self._commit(_key(one)), manifest)
                sent.append(_key(one))
        skipped = [_key(one) for one in found if _key(one) not in sent]
        return Pushed(sent=sent, skipped=skipped, pruned=self._prune(keep=keep))

    def fetch_newest(self, into: Path) -> list[str]:
        """Put what a role goes on from below ``into`` and return the keys.

        Raises PreflightError when an object is not what its manifest says; nothing of that
        checkpoint is then to be seen.
        """
        manifests = self._manifests()
        newest = plan_resume({key: one for key, (one, _) in manifests.items()})
        for key in newest:
            one, digests = manifests[key]
            self._fetch(key, one, digests, into)
        return newest

    def _manifests(self) -> dict[str, tuple[Checkpoint, dict[str, str]]]:
        found: dict[str, tuple[Checkpoint, dict[str, str]]] = {}
        prefix = f"{self._prefix}/commits/"
        for path, size in self._listed(prefix):
            if size > MANIFEST_BYTES_MAX or not path.endswith(".json"):
                continue
            with self._asking("read what was kept"):
                text = bytes(obstore.get(self._store, path).bytes()).decode("utf-8", "replace")
            try:
                found[path.removeprefix(prefix).removesuffix(".json")] = parse_manifest(text)
            except ValueError:
                continue  # somebody else's: the bucket may be shared
        return found

    def _listed(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._asking("list what was kept"):
            count = 0
            for page in obstore.list(self._store, prefix):
                for meta in page:
                    count += 1
                    if count > COMMITS_MAX:
                        raise PreflightError(
                            f"more than {COMMITS_MAX} objects below {prefix}; clean it up"
                        )
                    yield str(meta["path"]), int(meta["size"])

    def _send(self, one: Checkpoint, folder: Path) -> dict[str, str] | None:
        """Send the bytes and return their digests; None when a file is not as it was listed."""
        digests: dict[str, str] = {}
        for file in one.files:
            path = folder / file.path
            try:
                digests[file.path] = digest_of(path)
                with self._asking("send a checkpoint"):
                    obstore.put(self._store, self._data(_key(one), file.path), path)
                state = path.stat()
            except FileNotFoundError:
                return None
            if (state.st_size, int(state.st_mtime)) != (file.size, file.changed_at):
                return None
        return digests

    def _prune(self, *, keep: int) -> list[str]:
        kept = self.kept()
        old = plan_prune(kept, keep=keep)
        for key in old:
            with self._asking("prune old checkpoints"):
                obstore.delete(self._store, self._commit(key))
                obstore.delete(
                    self._store, [self._data(key, file.path) for file in kept[key].files]
                )
        return old

    def _fetch(self, key: str, one: Checkpoint, digests: Mapping[str, str], into: Path) -> None:
        fetching, ready = into / FETCHING / key, into / resume_path(one)
        shutil.rmtree(fetching, ignore_errors=True)
        for file in one.files:
            path = fetching / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download(self._data(key, file.path), path, size=file.size)
            if digest_of(path) != digests[file.path]:
                raise PreflightError(
                    f"{self._told}: {key}/{file.path} is damaged; remove the checkpoint there and "
                    "start from the one before"
                )
        _move_into(fetching, ready, names=[file.path for file in one.files] * one.is_loose)
        shutil.rmtree(into / FETCHING, ignore_errors=True)

    def _download(self, name: str, path: Path, *, size: int) -> None:
        with self._asking("fetch a checkpoint"), path.open("wb") as file:
            num_bytes = 0
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=_CHUNK):
                num_bytes += len(chunk)
                if num_bytes > size:
                    raise PreflightError(f"{self._told}: {name} is larger than its manifest says")
                file.write(chunk)

    def _commit(self, key: str) -> str:
        return f"{self._prefix}/commits/{key}.json"

    def _data(self, key: str, path: str) -> str:
        return f"{self._prefix}/data/{key}/{path}"

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn what the store's client raises into an error of ours."""
        try:
            yield
        except BaseError as exc:
            raise PreflightError(
                f"{self._told}: cannot {what}: {_first_line(exc)}; check the URL and the "
                "credentials in the environment"
            ) from exc


def _key(one: Checkpoint) -> str:
    return f"{one.root}/{one.commit_name}"


def _move_into(folder: Path, ready: Path, *, names: Sequence[str]) -> None:
    """Put a whole checkpoint, or the loose files ``names``, where a role looks for it."""
    if names:
        ready.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).replace(ready / name)
        return
    ready.parent.mkdir(parents=True, exist_ok=True)
    if ready.exists():
        shutil.rmtree(ready)
    folder.rename(ready)


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]
