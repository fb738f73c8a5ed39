"""Which ssh keys an account at Lambda is known to have, so that it is not asked before each launch.

A file per account and key, below the operator's state. It may be wrong, since keys can be deleted
at the provider: a launch that is refused forgets it. It is only a shortcut, so a disk that is full
or a file that cannot be read costs a call and nothing else.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

_HASH_CHARS = 24
_NAME_CHARS_MAX = 256
_log = logging.getLogger("paceline.rental.lambda")


class KnownKeys:
    """Names under which our ssh keys are registered; several processes may share the folder."""

    def __init__(self, folder: Path, *, account: Callable[[], str]) -> None:
        """Take a folder, and who says which account it is; only a hash of that is kept."""
        self._folder = folder
        self._account = account

    def get(self, blob: str) -> str | None:
        """Return the name of a key that is known to be there."""
        try:
            name = self._path(blob).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as exc:
            _log.warning("what Lambda knows of our ssh keys cannot be read: %s", exc)
            return None
        return name if 0 < len(name) <= _NAME_CHARS_MAX and name.isprintable() else None

    def put(self, blob: str, name: str) -> str:
        """Remember that a key is registered, and return its name."""
        path = self._path(blob)
        scratch = path.with_name(f"{path.name}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch.write_text(name, encoding="utf-8")
            scratch.replace(path)
        except OSError as exc:
            _log.warning("that Lambda knows our ssh key is not remembered: %s", exc)
        return name

    def forget(self) -> None:
        """Forget every key of the account."""
        for path in self._folder.glob(f"{self._prefix()}*"):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                _log.warning("what Lambda knew of our ssh keys cannot be forgotten: %s", exc)

    def _path(self, blob: str) -> Path:
        return self._folder / f"{self._prefix()}{_hash(blob)}"

    def _prefix(self) -> str:
        return f"lambda-{_hash(self._account())}-"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]
