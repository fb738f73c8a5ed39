"""Checkpoints of one slot in a local directory: whole, or not to be seen.

    <slot>/<root>/<time>-<name>/     one checkpoint, and in it its manifest
    <slot>/.partial/                 what is being fetched; gone on with after a broken connection

A checkpoint appears by one rename, with its manifest in it, after every size was compared with
what the machine said.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from paceline.core.errors import PreflightError
from paceline.runs.checkpoints import (
    Checkpoint,
    parse_listing,
    parse_manifest,
    plan_prune,
    plan_resume,
    render_manifest,
    resume_path,
)

MANIFEST = "paceline-checkpoint.json"
PARTIAL = ".partial"
MANIFEST_BYTES_MAX = 64 << 20
_CHUNK = 1 << 20


class Shelf:
    """What is kept of one slot; belongs to one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kept(self) -> dict[str, Checkpoint]:
        """Return every whole checkpoint by its path below the shelf."""
        found: dict[str, Checkpoint] = {}
        for manifest in sorted(self._folder.glob(f"*/**/{MANIFEST}")):
            key = manifest.parent.relative_to(self._folder)
            if key.parts[0] == PARTIAL or manifest.stat().st_size > MANIFEST_BYTES_MAX:
                continue
            try:
                found[key.as_posix()] = parse_manifest(manifest.read_text(encoding="utf-8"))[0]
            except ValueError:
                continue  # not ours: the directory belongs to the user, who may put things there
        return found

    def path(self, key: str) -> Path:
        """Return where a kept checkpoint is."""
        return self._folder / key

    def fetch(
        self, one: Checkpoint, copy: Callable[[Path], None], *, is_still: Callable[[], bool]
    ) -> Path | None:
        """Have ``copy`` fill a folder and keep it if it holds what the machine has; else None.

        What was fetched of it before is there already, so that ``copy`` goes on with it.
        ``is_still`` is asked last: whether the machine has it unchanged.
        """
        partial = self._folder / PARTIAL / one.root / one.name
        try:
            partial.mkdir(parents=True, exist_ok=True)
            copy(partial)
            return self._keep(one, partial) if _has_all(partial, one) and is_still() else None
        except OSError as exc:
            raise PreflightError(
                f"cannot keep a checkpoint below {self._folder}: {exc.strerror}; free space or "
                "choose another --out"
            ) from exc

    def _keep(self, one: Checkpoint, partial: Path) -> Path:
        wanted = {file.path for file in one.files}
        for path in sorted(partial.rglob("*"), reverse=True):
            inner = path.relative_to(partial).as_posix()
            if path.is_file() and inner not in wanted:
                path.unlink()  # of an earlier try, and not there any more
        digests = {name: digest_of(partial / name) for name in wanted}
        (partial / MANIFEST).write_text(render_manifest(one, digests=digests), encoding="utf-8")
        kept = self._folder / one.root / one.commit_name
        kept.parent.mkdir(parents=True, exist_ok=True)
        if kept.exists():  # the same second, other sizes: the later look counts
            shutil.rmtree(kept)
        partial.rename(kept)
        return kept

    def prune(self, *, keep: int) -> list[str]:
        """Remove all but the newest ``keep`` of each kind and return what went."""
        old = plan_prune(self.kept(), keep=keep)
        for key in old:
            gone = self._folder / PARTIAL / f"pruned-{Path(key).name}"
            shutil.rmtree(gone, ignore_errors=True)
            gone.parent.mkdir(parents=True, exist_ok=True)
            self.path(key).rename(gone)  # out of sight at once, also if what follows fails
            shutil.rmtree(gone)
        return old

    def newest(self) -> dict[str, Path]:
        """Return what a role goes on from: where it goes, and where it is."""
        kept = self.kept()
        return {resume_path(kept[key]): self.path(key) for key in plan_resume(kept)}


def listed_here(base: Path, roots: Sequence[str], *, now_s: float) -> list[Checkpoint]:
    """Return the settled checkpoints below ``base`` on this machine, the newest first."""
    lines = [str(int(now_s))]
    for root in roots:
        top = base / root
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and not path.is_symlink():
                state = path.stat()
                inner = path.relative_to(base).as_posix()
                lines.append(f"{int(state.st_mtime)} {state.st_size} {inner}")
    return parse_listing("\n".join(lines), roots=roots)


def digest_of(path: Path) -> str:
    """Return a file's checksum, against damage on the way or on disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _has_all(folder: Path, one: Checkpoint) -> bool:
    """Say whether every file is there, as large as it was on the machine."""
    return all(
        (folder / file.path).is_file() and (folder / file.path).stat().st_size == file.size
        for file in one.files
    )
