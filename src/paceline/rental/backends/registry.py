"""Backends by name: registered classes, built-ins imported late, third parties by entry point."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from paceline.core.errors import UsageError
from paceline.core.registry import LazyEntry, load_entry
from paceline.rental.backends.protocol import BackendAdapter

ENTRY_POINT_GROUP = "paceline.backends"

BACKEND_REGISTRY: dict[str, type] = {}
"""Every class registered so far in this process; ``load_backend`` fills it as names are used."""

BUILT_IN: dict[str, LazyEntry] = {
    "lambda": LazyEntry("paceline.rental.backends.lambda_.adapter", "LambdaBackend"),
    "local": LazyEntry("paceline.rental.backends.local.adapter", "LocalBackend"),
    "local-docker": LazyEntry("paceline.rental.backends.docker.adapter", "DockerBackend"),
    "nebius": LazyEntry("paceline.rental.backends.nebius.adapter", "NebiusBackend", "nebius"),
    "runpod": LazyEntry("paceline.rental.backends.runpod.adapter", "RunpodBackend"),
    "ssh": LazyEntry("paceline.rental.backends.ssh.adapter", "SshBackend"),
    "vast": LazyEntry("paceline.rental.backends.vast.adapter", "VastBackend"),
}


def register_backend(name: str) -> Callable[[type], type]:
    """Return a class decorator that files a BackendAdapter under ``name``.

    Raises:
        ValueError: the name is taken (when the decorator is applied).
    """

    def decorate(cls: type) -> type:
        if name in BACKEND_REGISTRY:
            raise ValueError(f"backend {name!r} already registered to {BACKEND_REGISTRY[name]!r}")
        BACKEND_REGISTRY[name] = cls
        return cls

    return decorate


def backend_names() -> tuple[str, ...]:
    """Return every name that load_backend knows now, sorted; imports nothing."""
    third = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted(third | BUILT_IN.keys() | BACKEND_REGISTRY.keys()))


def load_backend(name: str) -> type[BackendAdapter]:
    """Return the class behind ``name``, importing it on first use.

    Raises:
        UsageError: no backend of that name.
        MissingExtraError: its optional library is not installed.
    """
    if name not in BACKEND_REGISTRY:
        _import_backend(name)
    return cast(type[BackendAdapter], BACKEND_REGISTRY[name])


def _import_backend(name: str) -> None:
    """Import ``name``'s module, which registers it; an entry point that did not is filed here."""
    if name in BUILT_IN:
        load_entry(BUILT_IN, name, port="backend")
        return
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            cls = point.load()
            BACKEND_REGISTRY.setdefault(name, cls)
            return
    raise UsageError(f"unknown backend {name!r}; known: {', '.join(backend_names())}")
