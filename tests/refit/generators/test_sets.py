"""Weights held twice: the pause writes nothing, and damage to one set never reaches the other."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.apply import write_install
from paceline.refit.errors import ApplyError
from paceline.refit.generators.protocol import EngineConfig, EngineState, Sampling
from paceline.refit.generators.transformers.sets import (
    Models,
    WeightSets,
    hold_weights,
    is_held_twice,
)
from paceline.testing.fakes.trainer import root_of
from paceline.testing.tiny_model import write_tiny_qwen3
from refit.generators.refitting import Follower, MemoryRun

PROMPT = [10, 20, 30]
GREEDY = Sampling(max_tokens=16, temperature=0)


@pytest.fixture
def run(tmp_path: Path) -> MemoryRun:
    return MemoryRun(write_tiny_qwen3(tmp_path))


@pytest.fixture
def follower(run: MemoryRun) -> Iterator[Follower]:
    made = Follower(run, "g-0", weights="twice")
    run.publish()
    made.settle()
    yield made
    made.close()


def roots(follower: Follower) -> tuple[str, str]:
    """Return what the live and the spare bytes are."""
    spare = follower.gate.spare_weights()
    assert spare is not None
    return root_of(dict(follower.gate.live_tensors())), root_of(dict(spare.tensors()))


def retry(follower: Follower) -> None:
    """Let the receiver try again what it has refused, at once."""
    follower.receiver._refusals.keep_only(frozenset())
    follower.settle()


def test_the_pause_only_exchanges(run: MemoryRun, follower: Follower) -> None:
    """At the safe point both versions are there whole; afterwards both sets are the new one."""
    seen: list[tuple[str, str]] = []
    at_safe_point = follower.engine.at_safe_point

    def watched(write: Callable[[], None], **options: Any) -> float:
        def write_watched() -> None:
            seen.append(roots(follower))
            write()
            seen.append(roots(follower))

        return at_safe_point(write_watched, **options)

    follower.engine.at_safe_point = watched  # type: ignore[method-assign]
    old = root_of(run.model.state())
    run.model.step()
    run.publish()
    follower.settle()
    new = root_of(run.model.state())
    assert seen == [(old, new), (new, old)]
    assert roots(follower) == (new, new)
    choice = follower.generate(PROMPT, GREEDY).choices[0]
    assert list(choice.token_ids) == run.model.greedy(PROMPT, 16)


def test_a_damaged_spare_set(run: MemoryRun, follower: Follower) -> None:
    """It is found before anything is served from it, and copied anew from the live one."""
    before = follower.generate(PROMPT, GREEDY)
    spare = follower.gate.spare_weights()
    assert spare is not None
    spare.tensors()["model.norm.weight"].data[0] ^= 1
    run.model.step()
    run.publish()
    follower.settle()
    assert follower.receiver.health().state is EngineState.READY
    assert follower.receiver.figures()["refusals"] == 1
    assert follower.generate(PROMPT, GREEDY) == before
    retry(follower)
    new = root_of(run.model.state())
    assert roots(follower) == (new, new)


def test_a_damaged_live_set(
    run: MemoryRun, follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage ends with the next version, and is told."""
    follower.gate.live_tensors()["model.norm.weight"].data[0] ^= 1
    run.model.step()
    run.publish()
    with caplog.at_level(logging.ERROR):
        follower.settle()
    new = root_of(run.model.state())
    assert root_of(dict(follower.gate.live_tensors())) == new
    assert "damaged while they were served" in caplog.text
    run.model.step()
    run.publish()
    follower.settle()
    new = root_of(run.model.state())
    assert roots(follower) == (new, new)


@pytest.mark.parametrize("nth", [1, 2], ids=["writing", "following"])
def test_a_write_that_breaks_off(
    run: MemoryRun, follower: Follower, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """In the spare set: refused, the old version is live. While following: the new one is."""
    old, calls = root_of(run.model.state()), []

    def broken(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == nth:
            raise ApplyError("broken off here")
        write_install(*args, **options)

    monkeypatch.setattr("paceline.refit.receiver.spare.write_install", broken)
    run.model.step()
    run.publish()
    follower.settle()
    new = root_of(run.model.state())
    assert roots(follower)[0] == (old if nth == 1 else new)
    assert follower.receiver.health().state is EngineState.READY
    retry(follower)
    run.model.step()
    run.publish()
    follower.settle()
    new = root_of(run.model.state())
    assert roots(follower) == (new, new)


def test_a_copy_is_tied_like_the_first() -> None:
    """Names that are one tensor in one set are one in the other; nothing is shared between both."""
    module = torch.nn.Module()
    module.first = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    module.second = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    module.second.weight = module.first.weight
    sets = WeightSets(Models(main=module), names="memory", is_twice=True)
    aliases = sets.live().aliases
    addresses = {name: view_address(each.data) for name, each in sets.tensors().items()}
    first = {name: view_address(each.data) for name, each in sets.live().buffers.items()}
    assert not set(addresses.values()) & set(first.values())
    sets.exchange()
    assert sets.live().aliases == aliases == {"second.weight": "first.weight"}
    assert {n: view_address(each.data) for n, each in sets.live().buffers.items()} == addresses


def test_a_tie_that_a_copy_would_lose() -> None:
    """Two parameters on one storage would part: refused, with what to do."""
    module = torch.nn.Module()
    module.one = torch.nn.Parameter(torch.zeros(4))
    module.two = torch.nn.Parameter(module.one.data)
    with pytest.raises(PreflightError, match="--weights once"):
        WeightSets(Models(main=module), names="memory", is_twice=True)


@pytest.mark.parametrize(
    ("wanted", "free", "is_twice"),
    [
        ("once", 10**12, False),
        ("twice", 0, True),
        ("auto", 0, False),
        ("auto", 299, False),
        ("auto", 300, True),
    ],
)
def test_when_weights_are_held_twice(*, wanted: str, free: int, is_twice: bool) -> None:
    """As told, or as memory allows: three times the weights."""
    assert is_held_twice(wanted, weight_bytes=100, memory_bytes=free) is is_twice


@pytest.mark.parametrize(
    ("field", "known"), [("weights", "auto, once, twice"), ("names", "memory, checkpoint")]
)
def test_what_is_not_known_is_refused(tmp_path: Path, field: str, known: str) -> None:
    """A word that is none says which there are."""
    with pytest.raises(UsageError, match=known):
        EngineConfig(model_dir=tmp_path, **{field: "thrice"})  # type: ignore[arg-type]


def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    """How often, how much, and why."""
    with caplog.at_level(logging.INFO):
        models = Models(main=torch.nn.Linear(512, 1024))
        hold_weights(models, names="memory", wanted="auto", memory_bytes=2**30)
    assert "weights of 2 MiB are held twice (auto, 1024 MiB are free)" in caplog.text


def view_address(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()
