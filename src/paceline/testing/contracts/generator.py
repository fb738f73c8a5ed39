"""What every rollout engine must do: inherit, implement ``make``, and all claims are tested."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from paceline.core.errors import DeadlineExceededError
from paceline.refit.errors import EngineNotReadyError, UncertainStateError
from paceline.refit.generators.protocol import (
    Choice,
    Generation,
    InstalledVersion,
    RolloutEngine,
    Sampling,
    spare_of,
)

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")
TIMEOUT_S = 30.0


class RolloutEngineContract(ABC):
    """Claims about live weights, labels and generation, for any rollout engine."""

    prompt: Sequence[int] = (10, 11, 12)
    text = "12+34="
    """Text that the tokenizer gives back unchanged."""

    @abstractmethod
    def make(self) -> RolloutEngine:
        """Return a fresh engine in which nothing is installed."""

    @abstractmethod
    def weights(self) -> Mapping[str, bytes]:
        """Return weights that make sense, for every live tensor."""

    @pytest.fixture
    def engine(self) -> Iterator[RolloutEngine]:
        """Return a fresh engine, closed afterwards."""
        engine = self.make()
        yield engine
        engine.close(timeout_s=TIMEOUT_S)

    def install(self, engine: RolloutEngine, label: InstalledVersion) -> float:
        """Write sensible weights at a safe point, as a receiver does."""
        wanted = self.weights()

        def write() -> None:
            for name, buffer in engine.live_tensors().items():
                buffer.data[:] = wanted[name]

        return engine.at_safe_point(write, installed=label, timeout_s=TIMEOUT_S)

    def generate(self, engine: RolloutEngine, sampling: Sampling) -> Generation:
        """Return the finished generation for the sample prompt."""
        return engine.submit(self.prompt, sampling).result(TIMEOUT_S)

    def test_live_tensors_are_the_same_writable_memory(self, engine: RolloutEngine) -> None:
        """Each look returns views of the same bytes, and what is written there is there."""
        first, second = engine.live_tensors(), engine.live_tensors()
        assert first
        assert set(first) == set(second)
        self.install(engine, V1)
        wanted = self.weights()
        for name, buffer in first.items():
            assert not buffer.data.readonly
            assert bytes(buffer.data) == bytes(second[name].data) == wanted[name]

    def test_aliases_point_to_live_tensors(self, engine: RolloutEngine) -> None:
        """A further name is never itself live, and its tensor is."""
        live = engine.live_tensors()
        for alias, name in engine.tensor_aliases().items():
            assert alias not in live
            assert name in live

    def test_sets_of_weights_are_exchanged(self, engine: RolloutEngine) -> None:
        """What was written into the spare set is what is served; the set before is spare then."""
        spare = spare_of(engine)
        if spare is None:
            pytest.skip("this engine holds its weights once")
        self.install(engine, V1)
        before, wanted = engine.live_tensors(), self.weights()
        for name, buffer in spare.tensors().items():
            buffer.data[:] = wanted[name]
            before[name].data[:] = bytes(len(wanted[name]))
        engine.at_safe_point(spare.exchange, installed=V2, timeout_s=TIMEOUT_S)
        for name, buffer in engine.live_tensors().items():
            assert bytes(buffer.data) == wanted[name]
            assert not any(spare.tensors()[name].data)
        (choice,) = self.generate(engine, Sampling(max_tokens=4, ignore_eos=True)).choices
        assert [span.installed for span in choice.spans] == [V2]

    def test_nothing_is_served_before_the_first_install(self, engine: RolloutEngine) -> None:
        """Weights that nobody published are never served."""
        assert engine.installed() is None
        with pytest.raises(EngineNotReadyError):
            engine.submit(self.prompt, Sampling(max_tokens=1))

    def test_an_install_is_what_is_served(self, engine: RolloutEngine) -> None:
        """Label and every token's span are the installed version's; the pause is told."""
        for label in (V1, V2):
            assert self.install(engine, label) >= 0
            assert engine.installed() == label
            found = self.generate(engine, Sampling(max_tokens=4, n=2, ignore_eos=True))
            assert found.prompt_token_ids == tuple(self.prompt)
            assert len(found.choices) == 2
            for choice in found.choices:
                assert_is_whole(choice, num_tokens=4)
                assert [span.installed for span in choice.spans] == [label]

    def test_a_seed_repeats(self, engine: RolloutEngine) -> None:
        """With the same weights a seed gives the same choices."""
        self.install(engine, V1)
        sampling = Sampling(max_tokens=6, n=2, seed=7, ignore_eos=True)
        first, again = (self.generate(engine, sampling).choices for _ in range(2))
        assert [one.token_ids for one in first] == [one.token_ids for one in again]

    def test_a_write_that_fails_keeps_the_label(self, engine: RolloutEngine) -> None:
        """The error passes through and the version before is served on."""
        self.install(engine, V1)
        with pytest.raises(OSError, match="disk"):
            engine.at_safe_point(_raiser(OSError("disk")), installed=V2, timeout_s=TIMEOUT_S)
        assert engine.installed() == V1
        found = self.generate(engine, Sampling(max_tokens=1))
        assert found.choices[0].spans[0].installed == V1

    def test_an_uncertain_write_takes_the_label(self, engine: RolloutEngine) -> None:
        """After a write that could not be undone nothing is served until the next install."""
        self.install(engine, V1)
        uncertain = _raiser(UncertainStateError("half written"))
        with pytest.raises(UncertainStateError):
            engine.at_safe_point(uncertain, installed=V2, timeout_s=TIMEOUT_S)
        assert engine.installed() is None
        with pytest.raises(EngineNotReadyError):
            engine.submit(self.prompt, Sampling(max_tokens=1))
        self.install(engine, V2)
        assert self.generate(engine, Sampling(max_tokens=1)).choices

    def test_a_second_writer_has_a_deadline(self, engine: RolloutEngine) -> None:
        """While one writes another gives up in time, and its write does not run."""
        entered, leave = threading.Event(), threading.Event()

        def write() -> None:
            entered.set()
            assert leave.wait(TIMEOUT_S)

        thread = threading.Thread(
            target=lambda: engine.at_safe_point(write, installed=V1, timeout_s=TIMEOUT_S)
        )
        thread.start()
        try:
            assert entered.wait(TIMEOUT_S)
            ran: list[str] = []
            with pytest.raises(DeadlineExceededError):
                engine.at_safe_point(lambda: ran.append("x"), installed=V2, timeout_s=0.01)
            assert ran == []
        finally:
            leave.set()
            thread.join(TIMEOUT_S)
        assert engine.installed() == V1

    def test_text_goes_there_and_back(self, engine: RolloutEngine) -> None:
        """Encoding and decoding are each other's inverse, without special tokens."""
        assert engine.decode(engine.encode(self.text)) == self.text

    def test_an_idle_engine_has_nothing_to_do(self, engine: RolloutEngine) -> None:
        """Load is what runs and waits: nothing."""
        assert (engine.load().running, engine.load().waiting) == (0, 0)

    def test_close_is_final_and_idempotent(self, engine: RolloutEngine) -> None:
        """After it nothing is taken."""
        self.install(engine, V1)
        engine.close(timeout_s=TIMEOUT_S)
        engine.close(timeout_s=TIMEOUT_S)
        with pytest.raises(EngineNotReadyError):
            engine.submit(self.prompt, Sampling(max_tokens=1))


def assert_is_whole(choice: Choice, *, num_tokens: int) -> None:
    """A choice has a log-probability for each token, and spans from the first to the last."""
    assert len(choice.token_ids) == len(choice.logprobs) == num_tokens
    assert all(each <= 0 for each in choice.logprobs)
    assert choice.finish_reason == "length"
    ends = [0, *(span.end for span in choice.spans)]
    assert [span.start for span in choice.spans] == ends[:-1]
    assert ends[-1] == num_tokens


def _raiser(error: Exception) -> Callable[[], None]:
    def write() -> None:
        raise error

    return write
