"""Tokens as server-sent events, over a real server, and what is admitted."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from paceline.core.waiting import wait_until
from paceline.refit.generators.protocol import EngineHealth, EngineState, InstalledVersion, Sampling
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.server import EngineServer
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator

V5 = InstalledVersion(version_id="v5", sequence=5, root_digest="aa")
TOKEN = "data-token-of-a-test"  # noqa: S105


@dataclass
class World:
    engine: FakeGenerator
    client: httpx.Client
    newest: int = 7

    def events(self, **fields: object) -> list[dict[str, object]]:
        """Return the documents of a stream; the end must be said."""
        with self.client.stream(
            "POST", "/v1/completions", json={"stream": True, **fields}
        ) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]" or "error" in lines[-1]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@pytest.fixture
def world() -> Iterator[World]:
    engine = FakeGenerator()
    engine.at_safe_point(lambda: None, installed=V5, timeout_s=1)
    server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.endpoint, headers=headers, trust_env=False) as client:
        made = World(engine, client)
        app = build_app(
            ServingParts(
                engine=engine,
                model_name="m",
                token=TOKEN,
                health=lambda: EngineHealth(state=EngineState.READY, installed=V5),
                figures=dict,
                newest=lambda: made.newest,
                clock=system_clock(),
                new_id=lambda: "x",
                request_timeout_s=5,
            )
        )
        server.start(app, grace_s=1)
        yield made
    engine.close(timeout_s=1)
    server.close(timeout_s=20)


def test_events(world: World) -> None:
    """Every choice of every prompt comes under its number, with versions, staleness and usage."""
    fields = {"prompt": [[1], [2]], "n": 2, "max_tokens": 3, "logprobs": 0}
    documents = world.events(**fields, stream_options={"include_usage": True})
    usage = documents.pop()
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    choices = {each["choices"][0]["index"]: each["choices"][0] for each in documents}  # type: ignore[index]
    expected = [
        choice
        for at in (0, 1)
        for choice in world.engine.generate([at + 1], Sampling(max_tokens=3, n=2), V5).choices
    ]
    assert [choices[at]["token_ids"] for at in range(4)] == [list(c.token_ids) for c in expected]
    for each in choices.values():
        assert each["staleness"] == 2
        assert each["finish_reason"] == "length"
        assert each["weight_versions"] == [
            {"version_id": "v5", "sequence": 5, "root_digest": "aa", "start": 0, "end": 3}
        ]


def test_whole_answers_say_their_staleness(world: World) -> None:
    """A choice says how far its oldest weights were behind when it was answered."""
    answer = world.client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).json()
    assert answer["choices"][0]["staleness"] == 2
    text = world.client.get("/metrics").text
    assert "paceline_choice_staleness_sum 2.0" in text
    assert "paceline_staleness 2.0" in text


@pytest.mark.parametrize("is_stream", [False, True])
def test_too_stale_is_not_admitted(world: World, *, is_stream: bool) -> None:
    """Whoever wants fresher weights than there are is told so before anything is generated."""
    fields = {"prompt": [1], "max_staleness": 1, "stream": is_stream}
    refused = world.client.post("/v1/completions", json=fields)
    assert refused.status_code == 503
    assert "2 versions behind, 1 are allowed" in refused.json()["error"]["message"]
    assert world.engine.requests == []
    world.newest = 6
    assert world.client.post("/v1/completions", json=fields).status_code == 200


def test_refusals_before_the_first_event_have_a_status(world: World) -> None:
    """A stream that cannot begin is an answer like any other."""
    assert (
        world.client.post(
            "/v1/completions", json={"prompt": [1], "stream": True, "n": 0}
        ).status_code
        == 400
    )


def test_an_engine_that_stops_says_so_in_the_stream(world: World) -> None:
    """A stream that breaks off ends with the error, not with the end of a good one."""
    world.engine.is_held = True
    with world.client.stream(
        "POST", "/v1/completions", json={"prompt": [1], "stream": True}
    ) as response:
        assert response.status_code == 200
        world.engine.close(timeout_s=1)
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["type"] == "unavailable_error"
    assert 'paceline_requests_total{outcome="not_ready"} 1.0' in world.client.get("/metrics").text


def test_a_reader_who_leaves_frees_the_place(world: World) -> None:
    """Closing the connection cancels the work."""
    world.engine.is_held = True
    with world.client.stream(
        "POST", "/v1/completions", json={"prompt": [1], "stream": True}
    ) as response:
        assert response.status_code == 200
    wait_until(
        world.engine.held[0].cancelled,
        what="the cancellation",
        clock=system_clock(),
        timeout_s=10,
        interval_s=0.01,
    )


def test_bodies_do_not_wait_for_acknowledgements() -> None:
    """What is accepted names its protocol, without which asyncio leaves Nagle's algorithm on."""
    server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
    port = int(server.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server._socket.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
    server.close(timeout_s=1)
