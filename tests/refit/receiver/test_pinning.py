"""Engines that are pinned to a version: back, forth, and the newest again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import ControlError, NotFoundError, PreconditionError
from paceline.refit.generators.protocol import EngineState
from paceline.refit.model import Pin, RetentionPolicy
from paceline.refit.receiver.pinning import pin_of
from paceline.testing.fakes.trainer import bytes_of, root_of
from refit.receiver.test_receiver import STATES, World


def pin(workers: str, version_id: str) -> Pin:
    return Pin(model_name="m", workers=workers, version_id=version_id)


@given(st.lists(st.sampled_from(["*", "gen-*", "gen-0", "gen-1", "?en-0"]), unique=True))
def test_the_longest_pattern_counts(patterns: list[str]) -> None:
    """Whoever is named more closely is pinned so; order is no matter."""
    found = pin_of("gen-0", [pin(each, each) for each in patterns])
    matching = [each for each in patterns if each != "gen-1"]
    if found is None:
        assert not matching
    else:
        assert len(found.workers) == max(map(len, matching))
        assert found == pin_of("gen-0", [pin(each, each) for each in reversed(patterns)])


class TestPinned:
    def test_back_and_forth(self) -> None:
        """A pin leads back over the full version, holds against newer ones, and is taken away."""
        world = World()
        world.publish(3)
        world.settle()
        assert world.engine.live_bytes() == bytes_of(STATES[3])
        world.ledger.set_pin(pin("gen-0", "v1"))
        world.clock.advance(1)
        world.settle()
        assert world.engine.live_bytes() == bytes_of(STATES[1])
        world.publish(4, first=4)
        world.settle()
        report = world.report()
        assert (report.version_id, report.root_digest) == ("v1", root_of(STATES[1]))
        assert report.state == "ready"
        world.ledger.set_pin(pin("gen-0", ""))
        world.clock.advance(1)
        world.settle()
        assert world.engine.live_bytes() == bytes_of(STATES[4])

    def test_two_engines_two_versions(self) -> None:
        """Two engines serve two versions side by side, each bit for bit; age does not matter."""
        world = World()
        other, receiver = world.join("b-1")
        world.publish(3)
        world.ledger.set_pin(pin("b-*", "v2"))
        world.settle()
        world.settle(receiver)
        assert world.engine.live_bytes() == bytes_of(STATES[3])
        assert other.live_bytes() == bytes_of(STATES[2])

    def test_not_there_yet_is_not_served(self) -> None:
        """Until the pinned version is in, the engine says that it must not be asked, and why."""
        world = World()
        world.publish(2)
        world.settle()
        world.ledger.set_pin(pin("*", "v1"))
        world.ledger.delete_version("v0")
        world.clock.advance(1)
        world.settle()
        health = world.receiver.health()
        assert health.state is EngineState.STALE
        assert "pinned to v1" in health.reason
        assert world.engine.live_bytes() == bytes_of(STATES[2])
        world.ledger.set_pin(pin("*", ""))
        world.clock.advance(1)
        world.settle()
        assert world.receiver.health().state is EngineState.READY

    def test_age_does_not_matter(self) -> None:
        """The bound on staleness is for engines that follow; a pin is an order."""
        world = World()
        world.receiver = world.follow(world.engine, "gen-0")
        world.publish(4)
        world.ledger.set_pin(pin("gen-0", "v0"))
        world.settle()
        config = world.receiver._config
        world.receiver._config = replace(config, bound=replace(config.bound, versions=1))
        assert world.receiver.health().state is EngineState.READY

    def test_a_service_without_pins(self) -> None:
        """A control service of an older release is followed as before."""
        world = World()

        def refuse(model_name: str) -> None:
            raise ControlError("it does not know this call")

        world.line.list_pins = refuse  # type: ignore[attr-defined]
        world.publish(1)
        world.settle()
        assert world.engine.live_bytes() == bytes_of(STATES[1])


class TestLedger:
    def test_only_what_can_be_served(self) -> None:
        """A pin names a READY version of the model; taking away what is not there is an error."""
        world = World()
        world.publish(1)
        with pytest.raises(NotFoundError):
            world.ledger.set_pin(pin("*", "v9"))
        with pytest.raises(NotFoundError):
            world.ledger.set_pin(pin("*", ""))
        with pytest.raises(PreconditionError, match="of model"):
            world.ledger.set_pin(replace(pin("*", "v1"), model_name="other"))
        world.ledger.delete_version("v1")
        with pytest.raises(PreconditionError, match="READY"):
            world.ledger.set_pin(pin("*", "v1"))

    def test_pinned_versions_stay(self) -> None:
        """The policy retires no version that somebody is pinned to, nor what it stands on."""
        world = World()
        world.publish(4)
        world.trainer.publish_full("v4-full", 4, STATES[4])
        world.ledger.set_pin(pin("gen-0", "v1"))
        world.ledger.set_retention("m", RetentionPolicy(keep_last=1))
        world.ledger.reap()
        ready = {v.uid for v in world.ledger.list_versions("m") if v.state.value == "READY"}
        assert ready == {"v0", "v1", "v4-full"}
