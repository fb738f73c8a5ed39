"""Copy a file or directory tree as ``rsync -rlpt`` does, where there is no rsync."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.rental.remote.rules import Copy, Rule, compile_rules, is_excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """What tells whether a file is still the same."""

    num_bytes: int
    inode: int
    changed_ns: int


def states_of(path: Path, copy: Copy) -> dict[str, FileState]:
    """Return the files that a copy of ``path`` speaks of; none where there is no such path."""
    rules = copy.rules()
    names = [""] if path.is_file() else []
    with suppress(OSError):  # what cannot be looked into was not copied either
        if path.is_dir():
            names += (name for name, is_dir in walk(path, rules) if not is_dir)
    found: dict[str, FileState] = {}
    for name in names:
        try:
            one = (path / name).lstat()
        except FileNotFoundError:
            continue  # it went away while we looked
        found[name] = FileState(num_bytes=one.st_size, inode=one.st_ino, changed_ns=one.st_ctime_ns)
    return found


def walk(src: Path, rules: Sequence[Rule], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every path below ``src`` that is to be copied, and whether it is a directory."""
    for entry in os.scandir(src):
        path = prefix + entry.name
        is_dir = entry.is_dir(follow_symlinks=False)
        if not is_excluded(rules, path, is_dir=is_dir):
            yield path, is_dir
            if is_dir:
                yield from walk(Path(entry.path), rules, f"{path}/")


def copy_tree(
    src: Path,
    dst: Path,
    *,
    includes: Iterable[str] = (),
    excludes: Iterable[str] = (),
    delete: bool = False,
) -> None:
    """Make ``dst`` a copy of ``src``: contents, links, modes, times, empty directories.

    Each file is written beside its place and then renamed, so a reader sees the old one or
    the new one. What goes away while it is copied is left out.

    Raises:
        OSError: something could not be read or written, or a directory that is not empty
            stands where something else should be and ``delete`` is off.
    """
    rules = compile_rules(includes=includes, excludes=excludes)
    if src.is_dir():
        _Copy(rules=rules, delete=delete).directory(src, dst, "")
    elif not is_excluded(rules, src.name, is_dir=False):
        _Copy(rules=rules, delete=False).entry(src, dst, src.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One copy under way; ``path`` is always relative to the root of the transfer."""

    rules: Sequence[Rule]
    delete: bool

    def directory(self, src: Path, dst: Path, path: str) -> None:
        """Copy what is in ``src``, then its mode and times, which copying into it would change."""
        prefix = f"{path}/" if path else ""
        names = {entry.name for entry in os.scandir(src) if not self._excludes(entry, prefix)}
        if not _is_real_directory(dst):
            self._make_way(dst, path)
            dst.mkdir()
        if self.delete:
            self._delete_others(dst, prefix, names)
        for name in sorted(names):
            self.entry(src / name, dst / name, prefix + name)
        found = src.stat()
        dst.chmod(stat.S_IMODE(found.st_mode))
        os.utime(dst, ns=(found.st_atime_ns, found.st_mtime_ns))

    def entry(self, src: Path, dst: Path, path: str) -> None:
        """Copy one file, link or directory; sockets, pipes and devices are passed over."""
        try:
            found = src.lstat()
        except FileNotFoundError:  # whoever writes there goes on writing
            return
        if stat.S_ISDIR(found.st_mode):
            self.directory(src, dst, path)
        elif stat.S_ISLNK(found.st_mode):
            self._link(src, found, dst, path)
        elif stat.S_ISREG(found.st_mode) and not _is_same_file(found, dst):
            self._file(src, found, dst, path)

    def _link(self, src: Path, found: os.stat_result, dst: Path, path: str) -> None:
        target = src.readlink()
        if not (dst.is_symlink() and dst.readlink() == target):
            self._make_way(dst, path)
            dst.symlink_to(target)
        os.utime(dst, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)

    def _file(self, src: Path, found: os.stat_result, dst: Path, path: str) -> None:
        if _is_real_directory(dst):
            self._make_way(dst, path)
        descriptor, name = tempfile.mkstemp(prefix=f".{dst.name[:100]}.", dir=dst.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as target, src.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
            draft.chmod(stat.S_IMODE(found.st_mode))
            os.utime(draft, ns=(found.st_atime_ns, found.st_mtime_ns))
            draft.replace(dst)
        finally:
            draft.unlink(missing_ok=True)

    def _make_way(self, dst: Path, path: str) -> None:
        """Remove what stands where something of another kind should be."""
        if not _is_real_directory(dst):
            dst.unlink(missing_ok=True)
        elif self.delete:
            self._delete(dst, path)
        if _is_real_directory(dst):
            dst.rmdir()

    def _delete_others(self, dst: Path, prefix: str, keep: set[str]) -> None:
        for entry in list(os.scandir(dst)):
            if entry.name not in keep and not self._excludes(entry, prefix):
                self._delete(Path(entry.path), prefix + entry.name)

    def _delete(self, dst: Path, path: str) -> None:
        """Remove ``dst``; directories that hold something excluded stay, with it."""
        if not _is_real_directory(dst):
            dst.unlink()
            return
        self._delete_others(dst, f"{path}/", set())
        if next(dst.iterdir(), None) is None:
            dst.rmdir()

    def _excludes(self, entry: os.DirEntry[str], prefix: str) -> bool:
        is_dir = entry.is_dir(follow_symlinks=False)
        return is_excluded(self.rules, prefix + entry.name, is_dir=is_dir)


def _is_real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_same_file(found: os.stat_result, dst: Path) -> bool:
    """Return whether size and time agree, as rsync asks; then only the mode is brought along."""
    if not dst.is_file() or dst.is_symlink():
        return False
    there = dst.stat()
    if (there.st_size, there.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
        return False
    if stat.S_IMODE(there.st_mode) != stat.S_IMODE(found.st_mode):
        dst.chmod(stat.S_IMODE(found.st_mode))
    return True
