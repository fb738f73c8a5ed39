"""Where things are: paths behind an endpoint, and several addresses in one text. Pure text."""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

_OBJECTS = "/v1/objects/"
MANIFESTS = "/v1/manifests/"
"""Where the path of every manifest begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPath:
    """One object."""

    object_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPath:
    """One manifest."""

    version_id: str
    source_slot_id: str


def object_path(object_id: str) -> str:
    """Return the path of an object."""
    return _OBJECTS + quote(object_id, safe="")


def manifest_path(version_id: str, source_slot_id: str) -> str:
    """Return the path of a manifest."""
    return f"{MANIFESTS}{quote(version_id, safe='')}/{quote(source_slot_id, safe='')}"


def parse_path(path: str) -> ObjectPath | ManifestPath | None:
    """Say what a path names, or None."""
    if path.startswith(_OBJECTS):
        found = _parts(path.removeprefix(_OBJECTS), 1)
        return ObjectPath(object_id=found[0]) if found else None
    if path.startswith(MANIFESTS):
        found = _parts(path.removeprefix(MANIFESTS), 2)
        return ManifestPath(version_id=found[0], source_slot_id=found[1]) if found else None
    return None


def split_address(address: str) -> tuple[str, str]:
    """Cut an address into endpoint and path.

    Raises:
        ValueError: it is no such address.
    """
    parts = urlsplit(address)
    if not parts.scheme or not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{address[:200]!r} is not the address of a manifest")
    return f"{parts.scheme}://{parts.netloc}", parts.path


def join_addresses(addresses: Iterable[str]) -> str:
    """Return one text that names all of them: ways to the same bytes, the publisher's best first.

    Raises:
        ValueError: there is none, or one that has a space in it.
    """
    found = list(addresses)
    if not found or any(not item or " " in item for item in found):
        raise ValueError(f"addresses are words without spaces, at least one: {found!r}")
    return " ".join(found)


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the single addresses of a text, the best first; one address is itself."""
    return tuple(text.split())


def scheme_of(address: str) -> str:
    """Return the word before ``://``, which says which transport reads there."""
    scheme, found, _ = address.partition("://")
    return scheme if found else ""


def _parts(text: str, count: int) -> list[str] | None:
    found = [unquote(part) for part in text.split("/")]
    return found if len(found) == count and all(found) else None
