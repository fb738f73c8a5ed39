"""A real SGLang server, where somebody has started one: there, back, and across an update.

python -m sglang.launch_server --model-path DIR --port 30000
export PACELINE_SGLANG_URL=http://127.0.0.1:30000 PACELINE_SGLANG_MODEL=DIR
pytest -m gpu tests/e2e/test_sglang.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.refit.generators.protocol import EngineConfig, InstalledVersion, Sampling
from paceline.refit.generators.sglang.engine import SglangEngine
from paceline.system import environ, system_clock

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]
URL, MODEL = environ().get("PACELINE_SGLANG_URL", ""), environ().get("PACELINE_SGLANG_MODEL", "")
LABELS = [
    InstalledVersion(version_id=f"v{at}", sequence=at, root_digest=f"{at:02x}") for at in range(3)
]
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[SglangEngine]:
    if not URL or not MODEL:
        pytest.skip("no server: PACELINE_SGLANG_URL and PACELINE_SGLANG_MODEL are not set")
    config = EngineConfig(model_dir=Path(MODEL), url=URL)
    made = SglangEngine(config, clock=system_clock(), new_seed=lambda: 7)
    yield made
    made.close(timeout_s=60)


def test_there_and_back(engine: SglangEngine) -> None:
    """v0 -> v1 -> v0: other tokens, then the first ones again, each under its own label."""
    data = np.frombuffer(engine.live_tensors()["model.norm.weight"].data, np.uint16)
    before = data.copy()

    def tokens(at: int) -> tuple[int, ...]:
        choice = engine.submit([1, 2, 3], GREEDY).result(120).choices[0]
        assert [span.installed for span in choice.spans] == [LABELS[at]]
        assert len(choice.logprobs) == 24
        return choice.token_ids

    def flip() -> None:
        data[::2] ^= 0x0080  # one power of two, up or down

    engine.at_safe_point(lambda: None, installed=LABELS[0], timeout_s=60)
    first = tokens(0)
    engine.at_safe_point(flip, installed=LABELS[1], timeout_s=60)
    assert tokens(1) != first
    engine.at_safe_point(flip, installed=LABELS[2], timeout_s=60)
    assert np.array_equal(data, before)
    assert tokens(2) == first


def test_across_an_update(engine: SglangEngine) -> None:
    """A sample in flight is whole, and names the versions in order."""
    engine.at_safe_point(lambda: None, installed=LABELS[0], timeout_s=60)
    future = engine.submit([1, 2, 3], Sampling(max_tokens=512, ignore_eos=True))
    engine.at_safe_point(lambda: None, installed=LABELS[1], timeout_s=60)
    choice = future.result(120).choices[0]
    assert [span.installed for span in choice.spans] in ([LABELS[0], LABELS[1]], [LABELS[1]])
    assert choice.spans[-1].end == 512
