"""The fake providers by name, and how the environment points an adapter at one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.serving import serving


def _vast() -> type[FakeCloud]:
    from paceline.testing.fakes.vast import FakeVast

    return FakeVast


def _runpod() -> type[FakeCloud]:
    from paceline.testing.fakes.runpod import FakeRunpod

    return FakeRunpod


FAKES: Mapping[str, Callable[[], type[Any]]] = {"runpod": _runpod, "vast": _vast}
"""Name -> what imports the class: one of them needs an SDK that may be missing."""

_VARIABLES = {
    "runpod": ("RUNPOD_API_BASE_URL", "RUNPOD_API_KEY"),
    "vast": ("VAST_URL", "VAST_API_KEY"),
}


@contextmanager
def serve_fake(fake: FakeCloud, *, port: int = 0) -> Iterator[dict[str, str]]:
    """Serve over the network and yield the variables that an adapter has to find."""
    url_name, key_name = _VARIABLES[fake.name]
    with serving(fake, port=port) as server:
        yield {url_name: server.url, key_name: fake.key}
