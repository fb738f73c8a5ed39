"""Copy files to and from a machine as a tar stream, where it has no rsync.

Everything goes over every time: without a program of ours there, nothing there can compare.
"""

import contextlib
import os
import posixpath
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from paceline.rental.errors import InstanceNotFoundError, RemoteCommandError
from paceline.rental.remote.channel import Channel
from paceline.rental.remote.rules import Copy, Rule, is_excluded
from paceline.rental.remote.tree import copy_tree, walk
from paceline.rental.remote.trouble import Trouble, lacks_program, shorten, trouble_of

_NO_HOME = 91
"""A status that nobody else uses: the machine's directory is not there."""
_LISTED_BYTES_MAX = 256 << 20


class TarTransfer:
    """Copies as a tar stream: everything, every time, since the other side cannot compare."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def push(self, src: Path, there: str, copy: Copy) -> None:
        """Copy the local ``src`` to the path ``there``. Raises RemoteCommandError."""
        if src.is_dir():
            rules = copy.rules()
            if copy.delete:
                self._delete_others(src, there, rules)
            script = f"mkdir -p {_quoted(there)} && cd {_quoted(there)} && exec tar -xpof -"
            self._send(script, partial(_pack, src, rules))
            return
        script = (
            f"there={_quoted(there)} name={_quoted(src.name)}; "
            'case "$there" in */) mkdir -p "$there";; esac; '
            'if [ -d "$there" ]; then cd "$there"; to=$name; '
            'else parent=$(dirname "$there"); mkdir -p "$parent" && cd "$parent" && '
            'to=$(basename "$there"); fi && draft=$(mktemp -d ./.paceline.XXXXXX) && '
            'tar -xpof - -C "$draft" && mv -f "$draft/$name" "./$to"; code=$?; '
            'rm -rf "$draft"; exit $code'
        )
        if not is_excluded(copy.rules(), src.name, is_dir=False):
            self._send(script, partial(_pack_file, src))

    def pull(self, there: str, dst: Path, copy: Copy, *, is_dir: bool) -> None:
        """Copy the path ``there`` to the local ``dst``."""
        path = there.rstrip("/")
        where = path if is_dir else posixpath.dirname(path) or "."
        name = "." if is_dir else posixpath.basename(path)
        script = f"cd {_quoted(where)} && exec tar -cf - {_quoted(name)}"
        with tempfile.TemporaryDirectory(prefix=".paceline-", dir=dst.parent) as scratch:
            self._receive(script, Path(scratch))
            got = Path(scratch) if is_dir else Path(scratch) / name
            target = dst / name if not is_dir and dst.is_dir() else dst
            copy_tree(got, target, includes=copy.includes, excludes=copy.excludes)

    def _delete_others(self, src: Path, there: str, rules: Sequence[Rule]) -> None:
        """Remove what is there and not here, apart from what an exclude speaks of."""
        directories = self._list(there, "-type d")
        others = self._list(there, "! -type d")
        doomed, doomed_directories = plan_deletion(
            dict(walk(src, rules)), others=others, directories=directories, rules=rules
        )
        for paths, command in ((doomed, "rm -f --"), (doomed_directories, "rmdir -- 2>/dev/null")):
            if paths:
                text = b"\0".join(b"./" + os.fsencode(path) for path in paths) + b"\0"
                script = f"cd {_quoted(there)} && xargs -0 {command}; exit 0"
                self._send(script, partial(_write, text))

    def _list(self, there: str, what: str) -> set[str]:
        script = f"cd {_quoted(there)} 2>/dev/null || exit 0; find . {what} -print0"
        with self._program(script) as process:
            text = process.stdout.read(_LISTED_BYTES_MAX) if process.stdout else b""
        paths = (os.fsdecode(path) for path in text.split(b"\0"))
        return {path.removeprefix("./") for path in paths if path not in ("", ".")}

    def _send(self, script: str, write: Callable[[IO[bytes]], None]) -> None:
        with self._program(script) as process:
            if process.stdin is not None:
                # A far side that has ended says why; what cannot be written does not.
                with contextlib.suppress(BrokenPipeError):
                    write(process.stdin)
                    process.stdin.close()

    def _receive(self, script: str, scratch: Path) -> None:
        with self._program(script) as process:
            if process.stdout is None:
                return
            try:
                with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                    tar.extractall(scratch, filter=_keep_inside)  # noqa: S202 - filtered
            except tarfile.TarError as exc:
                if process.wait() == 0:
                    raise RemoteCommandError(
                        f"{self._channel.name}: what came back is not to be unpacked: {exc}"
                    ) from exc
            process.stdout.read()

    @contextlib.contextmanager
    def _program(self, script: str) -> Iterator[subprocess.Popen[bytes]]:
        home = shlex.quote(self._channel.home)
        argv = self._channel.argv(
            ["sh", "-c", f"cd {home} 2>/dev/null || exit {_NO_HOME}; {script}"]
        )
        with tempfile.TemporaryFile() as said_file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said_file,
                start_new_session=True,
            )
            try:
                yield process
                if process.stdin is not None and not process.stdin.closed:
                    process.stdin.close()
                code = process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with contextlib.suppress(BrokenPipeError):
                            pipe.close()
            said_file.seek(0)
            self._refuse(code, said_file.read().decode(errors="replace"))

    def _refuse(self, code: int, said: str) -> None:
        if code == 0:
            return
        if code == _NO_HOME:
            raise InstanceNotFoundError(
                f"{self._channel.name}: its directory {self._channel.home} does not exist any "
                "more; provision another"
            )
        if lacks_program(said, "tar"):
            raise RemoteCommandError(
                f"{self._channel.name} has neither rsync nor tar; install one of them there"
            )
        if trouble_of(said) is not Trouble.OTHER:
            raise self._channel.error_of(said)
        raise RemoteCommandError(
            f"{self._channel.name}: copying as tar ended with {code}: {shorten(said)}"
        )


def plan_deletion(
    kept: dict[str, bool],
    *,
    others: Collection[str],
    directories: Collection[str],
    rules: Sequence[Rule],
) -> tuple[list[str], list[str]]:
    """Return which paths to remove there, and after them which directories, deepest first.

    Args:
        kept: what is to be there, and whether it is a directory.
        others: what is there, directories apart.
        directories: which directories are there.
        rules: what an exclude speaks of stays, with all below it.
    """
    doomed = [
        path for path in others if kept.get(path) is not False and not _is_spared(rules, path)
    ]
    doomed_directories = [
        path
        for path in directories
        if kept.get(path) is not True and not _is_spared(rules, path, is_dir=True)
    ]
    return sorted(doomed), sorted(doomed_directories, key=lambda path: (-path.count("/"), path))


def _is_spared(rules: Sequence[Rule], path: str, *, is_dir: bool = False) -> bool:
    parts = path.split("/")
    above = ("/".join(parts[:num]) for num in range(1, len(parts)))
    return is_excluded(rules, path, is_dir=is_dir) or any(
        is_excluded(rules, ancestor, is_dir=True) for ancestor in above
    )


def _pack(src: Path, rules: Sequence[Rule], out: IO[bytes]) -> None:
    def choose(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = info.name.removeprefix("./")
        if info.isfifo() or info.isdev():
            return None
        if path != "." and is_excluded(rules, path, is_dir=info.isdir()):
            return None
        return info

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(src, arcname=".", filter=choose)


def _pack_file(src: Path, out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(src, arcname=src.name, recursive=False)


def _keep_inside(info: tarfile.TarInfo, where: str) -> tarfile.TarInfo:
    """Refuse what would be written outside, and keep the mode, which the standard filter changes.

    Links may point anywhere, as they do for rsync; nothing is written through one.
    """
    return tarfile.tar_filter(info, where).replace(mode=info.mode & 0o777, deep=False)


def _write(content: bytes, out: IO[bytes]) -> None:
    out.write(content)


def _quoted(path: str) -> str:
    """Quote a path for the shell; one that begins with a dash is no option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)
