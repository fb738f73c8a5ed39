"""Starting a rollout engine: whatever is wrong is told, and nothing is left running."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.errors import PacelineError, PreflightError, UsageError
from paceline.refit import compose
from paceline.refit.compose import EngineServiceConfig
from paceline.refit.control.auth import write_private_json
from paceline.refit.errors import AccessRefusedError, ControlUnavailableError
from paceline.refit.generators.protocol import EngineConfig, EngineState
from paceline.testing.tiny_model import write_tiny_qwen3


@dataclass
class Place:
    """A control service, and what fits it."""

    config: EngineServiceConfig
    tokens: dict[str, str]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    tokens = compose.create_token_file(tmp_path / "tokens.json")
    service = compose.start_control_server(token_file=tmp_path / "tokens.json")
    write_credentials(tmp_path / "credentials.json", tokens["generator"])
    yield Place(
        EngineServiceConfig(
            engine=EngineConfig(model_dir=write_tiny_qwen3(tmp_path / "model")),
            control=service.address,
            model_name="m",
            run_id="r",
            credentials=tmp_path / "credentials.json",
            control_call_s=0.5,
            control_wait_s=0.0,
        ),
        tokens,
    )
    service.stop()


def write_credentials(path: Path, control_token: str) -> Path:
    fields = {"role": "generator", "control_token": control_token, "data_token": "d" * 32}
    write_private_json(path, fields)
    return path


def assert_refused(config: EngineServiceConfig, error: type[PacelineError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        compose.start_engine(config)
    assert "d" * 32 not in str(caught.value)
    ours = {"generate", "serve", "receive"}
    assert not [thread for thread in threading.enumerate() if thread.name in ours]


def test_starts_and_stops(place: Place) -> None:
    """An engine is registered when it answers, says how it is made, and may be stopped twice."""
    engine = replace(place.config.engine, weights="twice")
    service = compose.start_engine(replace(place.config, engine=engine))
    health = httpx.get(f"{service.endpoint}/health", trust_env=False).json()
    assert (health["state"], health["weights_held"]) == ("loading", "twice")
    assert service.health().state is EngineState.LOADING
    plane = compose.connect_control(place.config.control, token=place.tokens["operator"])
    assert [each.worker_id for each in plane.list_workers("m")] == [service.worker_id]
    assert service.worker_id.startswith("r-rollout-0-")
    service.stop()
    service.stop()
    assert service.crash() == ""
    plane.close()


def test_taken_port(place: Place) -> None:
    """A taken port is named before anything else is done."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(replace(place.config, port=port), PreflightError, str(port))


def test_no_model(place: Place, tmp_path: Path) -> None:
    """A directory without a model is named."""
    engine = EngineConfig(model_dir=tmp_path / "nothing")
    assert_refused(replace(place.config, engine=engine), PreflightError, "nothing")


def test_unknown_engine(place: Place) -> None:
    """An engine that does not exist is answered with those that do."""
    assert_refused(replace(place.config, engine_name="x"), UsageError, "known: .*transformers")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"weights": "twice"}, "--weights"),
        ({"lora": True}, "--lora"),
        ({"quantised": {"*": "fp8-block"}}, "--quantised"),
    ],
)
def test_options_of_another_engine(place: Place, options: dict[str, Any], word: str) -> None:
    """What only the embedded engine knows is refused before another one is started."""
    engine = replace(place.config.engine, **options)
    config = replace(place.config, engine=engine, engine_name="vllm")
    with pytest.raises(UsageError, match=f"'vllm' does not know {word}"):
        compose.start_any_engine(config)


def test_wrong_token(place: Place, tmp_path: Path) -> None:
    """A token that the service does not know is final."""
    wrong = write_credentials(tmp_path / "wrong.json", "w" * 32)
    assert_refused(replace(place.config, credentials=wrong), AccessRefusedError, "token")


def test_control_service_down(place: Place) -> None:
    """A service that is not there is told after the wait."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    assert_refused(replace(place.config, control=address), ControlUnavailableError, "127.0.0.1")
