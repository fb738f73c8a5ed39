"""The fake providers by name, and how the environment points an adapter at one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.serving import serving


def _lambda() -> type[FakeCloud]:
    from paceline.testing.fakes.lambda_ import FakeLambda

    return FakeLambda


def _nebius() -> type[FakeCloud]:
    from paceline.testing.fakes.nebius import FakeNebius

    return FakeNebius


def _runpod() -> type[FakeCloud]:
    from paceline.testing.fakes.runpod import FakeRunpod

    return FakeRunpod


def _vast() -> type[FakeCloud]:
    from paceline.testing.fakes.vast import FakeVast

    return FakeVast


FAKES: Mapping[str, Callable[[], type[Any]]] = {
    "lambda": _lambda,
    "nebius": _nebius,
    "runpod": _runpod,
    "vast": _vast,
}
"""Name -> what imports the class: one of them needs an SDK that may be missing."""

_ADDRESS_NAMES = {
    "lambda": "LAMBDA_CLOUD_BASE_URL",
    "nebius": "NEBIUS_ENDPOINT",
    "runpod": "RUNPOD_API_BASE_URL",
    "vast": "VAST_URL",
}
_KEY_NAMES = {
    "lambda": "LAMBDA_API_KEY",
    "nebius": "NEBIUS_IAM_TOKEN",
    "runpod": "RUNPOD_API_KEY",
    "vast": "VAST_API_KEY",
}


def fake_environ(fake: FakeCloud) -> dict[str, str]:
    """Return the variables in which an adapter finds the fake's key."""
    return {_KEY_NAMES[fake.name]: fake.key}


@contextmanager
def serve_fake(fake: FakeCloud, *, port: int = 0) -> Iterator[dict[str, str]]:
    """Serve over the network and yield the variables that an adapter has to find."""
    if fake.name == "nebius":
        from paceline.testing.fakes.nebius import serving_grpc

        with serving_grpc(fake, port=port) as endpoint:
            yield {_ADDRESS_NAMES[fake.name]: endpoint, **fake_environ(fake)}
        return
    path = "/api/v1" if fake.name == "lambda" else ""
    with serving(fake, port=port) as server:
        yield {_ADDRESS_NAMES[fake.name]: server.url + path, **fake_environ(fake)}
