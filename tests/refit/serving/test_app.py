"""The routes over a real server on loopback, on a real engine."""

import gc
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
import torch
from starlette.applications import Starlette

from paceline.core.errors import PreflightError, UsageError
from paceline.core.waiting import wait_until
from paceline.refit.generators.protocol import (
    EngineConfig,
    EngineHealth,
    EngineState,
    InstalledVersion,
    Sampling,
)
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.server import EngineServer
from paceline.system import system_clock
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3, write_weights

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
TOKEN = "data-token-of-a-test"  # noqa: S105


@dataclass
class World:
    """A served engine whose health a test may set."""

    engine: TransformersEngine
    client: httpx.Client
    health: EngineHealth

    def complete(self, **fields: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "tiny", **fields})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model_dir = write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model_dir=model_dir, dtype="float32", max_batch=4, max_waiting=2)
    clock = system_clock()
    engine = TransformersEngine(config, clock=clock, new_seed=lambda: 99)
    model = tiny_model(model_dir, seed=1, dtype=torch.float32)
    engine.at_safe_point(
        lambda: write_weights(engine.live_tensors(), model), installed=V1, timeout_s=5
    )
    world = World(engine, httpx.Client(), EngineHealth(state=EngineState.READY, installed=V1))
    app = build_app(
        ServingParts(
            engine=engine,
            model_name="tiny",
            token=TOKEN,
            health=lambda: world.health,
            figures=lambda: {"installs": 3},
            clock=clock,
            new_id=lambda: "abc",
            body_bytes_max=10_000,
        )
    )
    server = EngineServer(host="127.0.0.1", port=0, clock=clock)
    server.start(app, grace_s=5)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.endpoint, headers=headers, trust_env=False) as client:
        world.client = client
        yield world
    server.close(timeout_s=20)
    engine.close(timeout_s=10)


@pytest.fixture
def world(served: World) -> World:
    served.health = EngineHealth(state=EngineState.READY, installed=V1)
    return served


class TestCompletions:
    def test_token_prompt(self, world: World) -> None:
        """Tokens in, tokens, log-probabilities and version spans out, equal to the engine's own."""
        answer = world.complete(prompt=[10, 20], max_tokens=5, temperature=0, logprobs=0).json()
        sampling = Sampling(max_tokens=5, temperature=0)
        direct = world.engine.submit([10, 20], sampling).result(30).choices[0]
        (choice,) = answer["choices"]
        num_tokens = len(direct.token_ids)
        assert choice["token_ids"] == list(direct.token_ids)
        assert choice["prompt_token_ids"] == [10, 20]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(direct.logprobs, abs=1e-5)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == direct.text
        assert choice["weight_versions"] == [
            {
                "version_id": "v1",
                "sequence": 1,
                "root_digest": "aa",
                "start": 0,
                "end": num_tokens,
            }
        ]
        assert answer["usage"]["total_tokens"] == 2 + num_tokens

    def test_several_prompts(self, world: World) -> None:
        """Texts are numbered through prompt by prompt; equal prompts get streams of their own."""
        fields = {"prompt": ["1+1=", "1+1="], "n": 2, "max_tokens": 8, "seed": 3}
        answer = world.complete(**fields, ignore_eos=True).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4
        assert answer["choices"][0]["prompt_token_ids"] == world.engine.encode("1+1=")
        assert answer["choices"][0]["logprobs"] is None

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"prompt": [10**6]}, "prompt"),
            ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
            ({"prompt": "a", "n": 5}, "n"),
            ({"prompt": "a", "echo": True}, "echo"),
            ({"prompt": "a", "model": "other"}, "model"),
        ],
    )
    def test_bad_input(self, world: World, fields: dict[str, object], field: str) -> None:
        """What cannot be served is a 400 in the protocol's shape, which names the field."""
        response = world.complete(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field

    def test_large_body(self, world: World) -> None:
        """A body beyond the limit is not read to its end."""
        assert world.complete(prompt="a" * 20_000).status_code == 413

    def test_full_queue(self, world: World) -> None:
        """More prompts than the queue holds are refused together, and leave nothing behind."""
        response = world.complete(prompt=["a"] * 8, n=4, max_tokens=100, ignore_eos=True)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert world.complete(prompt="a", max_tokens=1).status_code == 200

    def test_disconnect_cancels(self, world: World) -> None:
        """A client that leaves frees its place in the batch."""
        with pytest.raises(httpx.ReadTimeout):
            world.client.post(
                "/v1/completions",
                json={"prompt": "a", "n": 4, "max_tokens": 100, "ignore_eos": True},
                timeout=httpx.Timeout(10, read=0.02),
            )
        wait_until(
            lambda: world.engine.load().running == 0,
            what="the batch to empty",
            clock=system_clock(),
            timeout_s=20,
            interval_s=0.01,
        )
        assert 'outcome="abandoned"' in world.client.get("/metrics").text


class TestStates:
    @pytest.mark.parametrize("state", [each for each in EngineState if each != EngineState.READY])
    def test_not_ready(self, world: World, state: EngineState) -> None:
        """In every other state nothing is generated, and the answer says when to come again."""
        world.health = replace(world.health, state=state, reason="because")
        response = world.complete(prompt="a", max_tokens=1)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "because" in response.json()["error"]["message"]
        health = world.client.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, state.value)

    def test_health(self, world: World) -> None:
        """Health names the version and its digest."""
        response = world.client.get("/health")
        assert response.status_code == 200
        assert response.json() == {
            "state": "ready",
            "reason": "",
            "version_id": "v1",
            "sequence": 1,
            "root_digest": "aa",
            "staleness": 0,
            "weights_held": "once",
        }


class TestAccess:
    @pytest.mark.parametrize("header", ["", "Bearer wrong", f"bearer {TOKEN}", f"Bearer {TOKEN}x"])
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions"])
    def test_token(self, world: World, header: str, path: str) -> None:
        """Without the exact token there is no answer and no secret in it."""
        method = "POST" if path.endswith("completions") else "GET"
        response = world.client.request(method, path, headers={"Authorization": header})
        assert response.status_code == 401
        assert TOKEN not in response.text

    def test_no_token_no_server(self, world: World) -> None:
        """An engine cannot be served without a token."""
        with pytest.raises(UsageError):
            ServingParts(
                engine=world.engine,
                model_name="tiny",
                token="",
                health=lambda: world.health,
                figures=dict,
                clock=system_clock(),
                new_id=str,
            )


def test_models(world: World) -> None:
    """The one model is listed."""
    assert [each["id"] for each in world.client.get("/v1/models").json()["data"]] == ["tiny"]


def test_metrics(world: World) -> None:
    """Figures of engine and receiver are there after a request."""
    world.complete(prompt="a", max_tokens=2, ignore_eos=True)
    text = world.client.get("/metrics").text
    assert "paceline_installed_sequence 1.0" in text
    assert "paceline_installs 3.0" in text
    assert 'paceline_requests_total{outcome="ok"}' in text


def test_taken_port() -> None:
    """A taken port is a preflight error that names it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PreflightError, match=str(port)):
            EngineServer(host="127.0.0.1", port=port, clock=system_clock())


def test_closes_unstarted() -> None:
    """A server that never started gives its port back."""
    server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
    server.close(timeout_s=1)
    port = int(server.endpoint.rsplit(":", 1)[1])
    EngineServer(host="127.0.0.1", port=port, clock=system_clock()).close(timeout_s=1)


def test_a_head_that_drips_is_cut() -> None:
    """Whoever never finishes asking does not keep a connection for ever; who asks is not cut."""
    server = EngineServer(host="127.0.0.1", port=0, clock=system_clock(), head_s=0.3)
    server.start(Starlette(), grace_s=1)
    address = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
    with socket.create_connection(address) as quick, socket.create_connection(address) as slow:
        quick.settimeout(10)
        slow.settimeout(10)
        slow.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        quick.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert quick.recv(12) == b"HTTP/1.1 404"
        assert slow.recv(1) == b""
    server.close(timeout_s=20)


def test_nothing_is_logged_for_those_who_leave(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An abandoned request ends quietly: it is counted, and no error of ours."""
    with pytest.raises(httpx.ReadTimeout):
        world.client.post(
            "/v1/completions",
            json={"prompt": "1+1=", "max_tokens": 120, "ignore_eos": True, "n": 4},
            timeout=0.01,
        )
    wait_until(
        lambda: world.engine.load().running == 0,
        what="the place is free",
        clock=system_clock(),
        timeout_s=20,
        interval_s=0.02,
    )
    gc.collect()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
