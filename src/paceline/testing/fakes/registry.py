"""The fake providers by name, and how the environment points an adapter at one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.serving import serving


def _vast() -> type[FakeCloud]:
    from paceline.testing.fakes.vast import FakeVast

    return FakeVast


def _nebius() -> type[FakeCloud]:
    from paceline.testing.fakes.nebius import FakeNebius

    return FakeNebius


def _runpod() -> type[FakeCloud]:
    from paceline.testing.fakes.runpod import FakeRunpod

    return FakeRunpod


def _lambda() -> type[FakeCloud]:
    from paceline.testing.fakes.lambda_ import FakeLambda

    return FakeLambda


FAKES: Mapping[str, Callable[[], type[Any]]] = {
    "lambda": _lambda,
    "nebius": _nebius,
    "runpod": _runpod,
    "vast": _vast,
}
"""Name -> what imports the class: one of them needs an SDK that may be missing."""

_VARIABLES = {
    "lambda": ("LAMBDA_CLOUD_BASE_URL", "LAMBDA_API_KEY"),
    "runpod": ("RUNPOD_API_BASE_URL", "RUNPOD_API_KEY"),
    "vast": ("VAST_URL", "VAST_API_KEY"),
}

_PATHS = {"lambda": "/api/v1"}


@contextmanager
def serve_fake(fake: FakeCloud, *, port: int = 0) -> Iterator[dict[str, str]]:
    """Serve over the network and yield the variables that an adapter has to find."""
    if fake.name == "nebius":
        from paceline.testing.fakes.nebius import PROJECT_ID, serving_grpc

        with serving_grpc(fake, port=port) as endpoint:
            yield {
                "NEBIUS_ENDPOINT": endpoint,
                "NEBIUS_IAM_TOKEN": fake.key,
                "NEBIUS_PROJECT_ID": PROJECT_ID,
            }
        return
    url_name, key_name = _VARIABLES[fake.name]
    with serving(fake, port=port) as server:
        yield {url_name: server.url + _PATHS.get(fake.name, ""), key_name: fake.key}
