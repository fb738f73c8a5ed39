"""What a checkpoint is, which ones are to be fetched, and which are to go. Pure.

A machine lists the files below the paths that are kept, one line each. What lies together there
is one checkpoint: a directory directly below a path (``checkpoints/step-20/``), or the loose files
of a path. It is fetched as one thing or not at all, and known again by its files' sizes and times.
What is still being written is left alone: a name that says so, or files that are not yet still.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.core.errors import PreflightError

SCHEMA = 1
FILES_MAX = 200_000
"""Of one listing; more is a working directory, not checkpoints."""
LISTING_BYTES_MAX = 64 << 20
SETTLE_S = 2
"""Files that changed more recently may be changing still."""
LOOSE = "files"
"""What the loose files of a path are called together."""
_UNFINISHED = (".tmp", ".partial", ".incomplete")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint."""
    size: int
    changed_at: int
    """Unix seconds, by the machine's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Files that belong together."""

    root: str
    """Path that they were found below: ``out``, or ``work/`` and a path of the job file."""
    name: str
    """Name of their directory there; ``LOOSE`` with ``is_loose`` for what lies beside them."""
    is_loose: bool
    files: tuple[FileEntry, ...]

    @property
    def changed_at(self) -> int:
        """When its newest file was written."""
        return max(file.changed_at for file in self.files)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    @property
    def source(self) -> str:
        """Where it is on the machine, relative to the run's directory."""
        return self.root if self.is_loose else f"{self.root}/{self.name}"

    @property
    def commit_name(self) -> str:
        """Name under which it is kept: names sort by time."""
        moment = datetime.fromtimestamp(self.changed_at, tz=UTC)
        return f"{moment:%Y%m%dT%H%M%SZ}-{self.name}"


def listing_command(run_id: str, roots: Sequence[str], *, into: str) -> str:
    """Return the shell line that lists files below ``roots`` on a machine into the file ``into``.

    Works with the ``stat`` of GNU, busybox and BSD. Roots come from a job file that was checked.
    """
    quoted = " ".join("'" + root.replace("'", "'\\''") + "'" for root in roots)
    return (
        f"cd {run_id} && {{ date +%s; f='-c%Y %s %n'; "
        'stat "$f" . >/dev/null 2>&1 || f="-f%m %z %N"; '
        f'for r in {quoted}; do if [ -e "$r" ]; then '
        'find "$r" -type f -exec stat "$f" {} +; fi; done; '
        f"}} > {into}.new && mv {into}.new {into}"
    )


def parse_listing(text: str, *, roots: Sequence[str]) -> list[Checkpoint]:
    """Return the settled checkpoints of a listing, the newest first.

    Raises PreflightError for more files than checkpoints have. A line that is none (a file name
    with a newline in it) makes its file missing, never another file.
    """
    lines = text.split("\n")
    now_s = int(lines[0]) if lines[0].isdecimal() else None
    if now_s is None:
        return []
    if len(lines) > FILES_MAX:
        raise PreflightError(
            f"more than {FILES_MAX} files below {', '.join(roots)}; name narrower paths under "
            "artifacts.pull"
        )
    found: dict[tuple[str, str, bool], list[FileEntry]] = {}
    for line in lines[1:]:
        placed = _place(line, roots)
        if placed is not None:
            key, entry = placed
            found.setdefault(key, []).append(entry)
    checkpoints = [
        Checkpoint(root=root, name=name, is_loose=is_loose, files=tuple(sorted(files)))
        for (root, name, is_loose), files in found.items()
    ]
    settled = [one for one in checkpoints if one.changed_at <= now_s - SETTLE_S]
    return sorted(settled, key=lambda one: (-one.changed_at, one.root, one.name))


def _place(line: str, roots: Sequence[str]) -> tuple[tuple[str, str, bool], FileEntry] | None:
    """Return which checkpoint a line's file belongs to, and the file; None for what is left."""
    changed, _, rest = line.partition(" ")
    size, _, path = rest.partition(" ")
    if not (changed.isdecimal() and size.isdecimal() and path) or ".." in path.split("/"):
        return None
    for root in roots:
        inner = path.removeprefix(f"{root}/")
        if path == root:  # the path is a file itself
            above, _, name = root.rpartition("/")
            entry = FileEntry(path=name, size=int(size), changed_at=int(changed))
            return (above, LOOSE, True), entry
        if inner != path:
            name, _, below = inner.partition("/")
            if is_unfinished(name):
                return None
            entry = FileEntry(path=below or name, size=int(size), changed_at=int(changed))
            return (root, name if below else LOOSE, not below), entry
    return None


def is_unfinished(name: str) -> bool:
    """Say whether a name tells that what bears it is being written."""
    return name.startswith((".", "tmp-")) or name.endswith(_UNFINISHED)


def plan_fetches(
    found: Sequence[Checkpoint], *, kept: Collection[Checkpoint], keep: int
) -> list[Checkpoint]:
    """Return what to fetch, the newest first; nothing that would be pruned at once.

    Args:
        found: what a machine has, the newest first.
        kept: what is here already.
        keep: how many of one kind are kept.
    """
    wanted: list[Checkpoint] = []
    counts: dict[tuple[str, bool], int] = {}
    for one in found:
        kind = (one.root, one.is_loose)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= keep and one not in kept:
            wanted.append(one)
    return wanted


def plan_prune(kept: Mapping[str, Checkpoint], *, keep: int) -> list[str]:
    """Return the keys of what is to go: all but the newest ``keep`` of each kind."""
    kinds: dict[tuple[str, bool], list[str]] = {}
    for key, one in kept.items():
        kinds.setdefault((one.root, one.is_loose), []).append(key)
    return [
        key
        for keys in kinds.values()
        for key in sorted(keys, key=lambda key: (kept[key].changed_at, key), reverse=True)[keep:]
    ]


def plan_resume(kept: Mapping[str, Checkpoint]) -> list[str]:
    """Return the keys of what a role goes on from: the newest of each kind."""
    newest: dict[tuple[str, bool], str] = {}
    for key in sorted(kept, key=lambda key: (kept[key].changed_at, key)):
        newest[(kept[key].root, kept[key].is_loose)] = key
    return sorted(newest.values())


def resume_path(one: Checkpoint) -> str:
    """Return where a checkpoint goes below PACELINE_RESUME_FROM: where it was below work or out."""
    root = one.root.removeprefix("work").removeprefix("out").strip("/")
    return "/".join(filter(None, (root, "" if one.is_loose else one.name)))


def render_manifest(one: Checkpoint, *, digests: Mapping[str, str]) -> str:
    """Return the document that makes a fetched checkpoint whole."""
    files = [
        {"path": f.path, "size": f.size, "changed_at": f.changed_at, "digest": digests[f.path]}
        for f in one.files
    ]
    found = {"root": one.root, "name": one.name, "is_loose": one.is_loose, "files": files}
    return json.dumps({"schema": SCHEMA, **found}, indent=1) + "\n"


def parse_manifest(text: str) -> tuple[Checkpoint, dict[str, str]]:
    """Return a checkpoint and its files' digests. Raises ValueError for what is no manifest."""
    try:
        found = json.loads(text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r} is not {SCHEMA}")
        files = tuple(
            FileEntry(path=str(f["path"]), size=int(f["size"]), changed_at=int(f["changed_at"]))
            for f in found["files"]
        )
        one = Checkpoint(
            root=str(found["root"]),
            name=str(found["name"]),
            is_loose=bool(found["is_loose"]),
            files=files,
        )
        digests = {str(f["path"]): str(f["digest"]) for f in found["files"]}
    except (KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"no manifest of a checkpoint: {exc}") from exc
    _refuse_odd_paths(one.root, one.name, *digests)
    if not files:
        raise ValueError("a checkpoint without files")
    return one, digests


def _refuse_odd_paths(*paths: str) -> None:
    """A manifest may come from a store that others write to: no path leads out of its folder."""
    for path in paths:
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ValueError(f"{path!r} leads out of the checkpoint")


def roots_of(pull: Iterable[str]) -> tuple[str, ...]:
    """Return the paths below a run's directory whose files are checkpoints."""
    return ("out", *(f"work/{path.strip('/')}" for path in pull))
