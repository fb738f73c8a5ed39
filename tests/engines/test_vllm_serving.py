"""vLLM's engine client behind our routes keeps the contract that every rollout engine keeps."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from paceline.refit.generators.protocol import InstalledVersion, RolloutEngine
from paceline.refit.generators.vllm.driver import OnlineDriver
from paceline.refit.generators.vllm.engine import VllmEngine
from paceline.refit.generators.workers import WorkersEngine
from paceline.system import system_clock
from paceline.testing.contracts.serving import TIMEOUT_S, V1, V2, Served, ServingContract

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread, as vLLM's server does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def client(model_dir: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Return vLLM's engine client with a model of random weights; they never change here."""
    options = AsyncEngineArgs(
        model=str(model_dir),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )

    async def start() -> Any:
        return AsyncLLM.from_engine_args(options)

    client = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
    yield client
    loop.call_soon_threadsafe(client.shutdown)


class TestVllm(ServingContract):
    """A tiny Qwen3 in vLLM, in processes of vLLM's own; labels change and weights do not."""

    client: Any
    driver: OnlineDriver

    @pytest.fixture(autouse=True)
    def _client(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self.driver = OnlineDriver(
            client, loop, update="immediate", drain_s=TIMEOUT_S, timeout_s=TIMEOUT_S
        )

    def make(self) -> RolloutEngine:
        return VllmEngine(
            self.client,
            self.driver._loop,
            workers=WorkersEngine(self.driver, clock=system_clock()),
            max_waiting=8,
            new_id=lambda: uuid4().hex,
        )

    def weights(self) -> Mapping[str, bytes]:
        return {}

    def install(self, served: Served, label: InstalledVersion) -> None:
        """Name what is in, as the end of an update does."""

        def write() -> None:
            self.driver._wait(self.client.update_weight_version(label.version_id))

        served.gate.at_safe_point(write, installed=label, timeout_s=TIMEOUT_S)

    def test_an_update_in_the_middle_is_recorded(self, served: Served) -> None:
        """It comes after the first token: here the stream says when that is there."""
        self.install(served, V1)
        spans, pieces = [], 0
        for piece in served.stream(
            self.prompt,
            first=lambda: self.install(served, V2),
            max_tokens=self.long,
            ignore_eos=True,
        ):
            pieces += 1
            spans += piece["weight_versions"]
        assert pieces > 1
        assert sorted({span["version_id"] for span in spans}) == ["v1", "v2"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert [span["version_id"] for span in spans] == sorted(
            span["version_id"] for span in spans
        )
        assert spans[-1]["end"] == self.long

    def test_tokens_come_while_they_are_made(self, served: Served) -> None:
        """With no update on the way, every piece names its version at once."""
        self.install(served, V1)
        pieces = served.stream(self.prompt, max_tokens=self.long, ignore_eos=True)
        assert len(pieces) > self.long // 4
        assert {s["version_id"] for piece in pieces for s in piece["weight_versions"]} == {"v1"}
