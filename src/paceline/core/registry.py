"""Names that become implementations on first use, and say which extra is missing."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from paceline.core.errors import MissingExtraError, UsageError


@dataclass(frozen=True, slots=True)
class LazyEntry:
    """Where an implementation lives and what has to be installed for it."""

    module: str
    attribute: str
    extra: str | None = None


def load_entry(entries: Mapping[str, LazyEntry], name: str, *, port: str) -> object:
    """Import and return what ``name`` stands for.

    Raises:
        UsageError: no such name; the message lists those there are.
        MissingExtraError: the implementation's library is absent; a broken implementation of
            ours still raises its own ImportError.
    """
    entry = entries.get(name)
    if entry is None:
        known = ", ".join(sorted(entries)) or "none"
        raise UsageError(f"unknown {port} {name!r}; known: {known}")
    try:
        module = import_module(entry.module)
    except ModuleNotFoundError as exc:
        if entry.extra is None or (exc.name or "").startswith("paceline"):
            raise
        raise MissingExtraError(
            f"{port} {name!r} needs {exc.name}; "
            f"install it with: pip install 'paceline[{entry.extra}]'"
        ) from exc
    found: object = getattr(module, entry.attribute)
    return found
