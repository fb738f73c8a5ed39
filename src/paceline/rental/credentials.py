"""Where a provider's key is: variables first, then files, asked again for every call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.rental.errors import AuthError

_FILE_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A key and where it was found."""

    key: str = field(repr=False)
    found_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """A file that may hold a key, and how to read it out of the text."""

    path: Path
    parse: Callable[[str], str | None] = field(default=lambda text: text.strip() or None)


def find_credential(
    environ: Mapping[str, str], *, names: Sequence[str], files: Sequence[KeyFile]
) -> Credential | None:
    """Return the first key there is.

    Raises:
        AuthError: a file is there and cannot be read.
    """
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return Credential(key=value, found_in=name)
    for file in files:
        key = _read(file)
        if key:
            return Credential(key=key, found_in=str(file.path))
    return None


def home_of(environ: Mapping[str, str]) -> Path:
    """Return the user's home directory as ``environ`` has it."""
    return Path(environ.get("HOME") or "/")


def value_of_line(text: str, name: str) -> str | None:
    """Return what the first line ``name = value`` says, without quotes."""
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == name:
            return value.strip().strip("'\"") or None
    return None


def _read(file: KeyFile) -> str | None:
    try:
        with file.path.open("rb") as opened:
            text = opened.read(_FILE_BYTES_MAX).decode("utf8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise AuthError(
            f"the key file {file.path} cannot be read: {exc.strerror}; mend its permissions"
        ) from exc
    return file.parse(text)
