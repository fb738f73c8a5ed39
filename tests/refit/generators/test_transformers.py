"""The transformers engine against Hugging Face's own generation, and across updates."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from paceline.core.errors import DeadlineExceededError, PreflightError, UsageError
from paceline.refit.errors import (
    BadRequestError,
    EngineBusyError,
    EngineNotReadyError,
    GenerationError,
    UncertainStateError,
)
from paceline.refit.generators.protocol import EngineConfig, InstalledVersion, Sampling
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.generators.transformers.loading import load_model
from paceline.refit.generators.transformers.sampling import make_streams
from paceline.system import system_clock
from paceline.testing.tiny_model import tiny_model, write_tiny_qwen3, write_weights

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")
PROMPTS = [[10, 20, 30], [5], [7, 8, 9, 10, 11, 12, 13], [40, 41]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(model_dir: Path) -> Iterator[TransformersEngine]:
    made = make_engine(model_dir)
    install(made, model_dir, seed=1, label=V1)
    yield made
    made.close(timeout_s=10)


def make_engine(model_dir: Path, **changes: object) -> TransformersEngine:
    config = EngineConfig(model_dir=model_dir, dtype="float32", **changes)  # type: ignore[arg-type]
    return TransformersEngine(config, clock=system_clock(), new_seed=lambda: 99)


def install(
    engine: TransformersEngine, model_dir: Path, *, seed: int, label: InstalledVersion
) -> None:
    """Write a whole model through the byte views, as a receiver does."""
    model = tiny_model(model_dir, seed=seed, dtype=torch.float32)
    engine.at_safe_point(
        lambda: write_weights(engine.live_tensors(), model), installed=label, timeout_s=5
    )


def reference(model_dir: Path, prompt: list[int], *, seed: int, num_tokens: int) -> list[int]:
    """Continue greedily by the library's own loop."""
    model = tiny_model(model_dir, seed=seed, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return [int(token_id) for token_id in out[0, len(prompt) :]]


def greedy(num_tokens: int, **changes: object) -> Sampling:
    return Sampling(max_tokens=num_tokens, temperature=0, **changes)  # type: ignore[arg-type]


class TestGreedy:
    def test_equals_library(self, engine: TransformersEngine, model_dir: Path) -> None:
        """Prompts of different lengths in one batch continue as each does alone elsewhere."""
        futures = [engine.submit(prompt, greedy(12)) for prompt in PROMPTS]
        for prompt, future in zip(PROMPTS, futures, strict=True):
            choice = future.result(timeout=30).choices[0]
            assert list(choice.token_ids) == reference(model_dir, prompt, seed=1, num_tokens=12)

    def test_late_joiners(self, engine: TransformersEngine, model_dir: Path) -> None:
        """Requests that join a batch in flight, and leave it early, disturb nobody."""
        lengths = [40, 3, 25, 1, 9]
        futures = []
        for at, num_tokens in enumerate(lengths):
            futures.append(engine.submit(PROMPTS[at % 4], greedy(num_tokens, ignore_eos=True)))
        for at, future in enumerate(futures):
            tokens = list(future.result(timeout=30).choices[0].token_ids)
            expected = reference(model_dir, PROMPTS[at % 4], seed=1, num_tokens=lengths[at])
            assert tokens[: len(expected)] == expected
            assert len(tokens) == lengths[at]

    def test_logprobs(self, engine: TransformersEngine, model_dir: Path) -> None:
        """Log-probabilities equal those of one pass over the whole text."""
        choice = engine.submit(PROMPTS[0], greedy(8, ignore_eos=True)).result(30).choices[0]
        model = tiny_model(model_dir, seed=1, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0], *choice.token_ids]])).logits[0]
        expected = torch.log_softmax(logits, -1)[2:-1].gather(
            1, torch.tensor(choice.token_ids)[:, None]
        )
        assert torch.allclose(torch.tensor(choice.logprobs), expected.squeeze(1), atol=1e-4)


class TestSampling:
    def test_seed_decides(self, engine: TransformersEngine) -> None:
        """The same seed gives the same choices, alone or among others; choices differ."""
        sampling = Sampling(max_tokens=10, seed=7, n=3, ignore_eos=True)
        alone = engine.submit(PROMPTS[0], sampling).result(timeout=30)
        crowd = [engine.submit(prompt, Sampling(max_tokens=15)) for prompt in PROMPTS]
        again = engine.submit(PROMPTS[0], sampling).result(timeout=30)
        assert [c.token_ids for c in alone.choices] == [c.token_ids for c in again.choices]
        assert len({c.token_ids for c in alone.choices}) == 3
        for future in crowd:
            assert future.result(timeout=30).choices

    def test_streams_do_not_meet(self) -> None:
        """Choices of neighbouring seeds and of neighbouring prompts draw different numbers."""
        requests = [Sampling(seed=seed, n=4).for_prompt(at) for seed in range(4) for at in range(4)]
        first = [one.random() for each in requests for one in make_streams(each, fresh_seed=0)]
        assert len(set(first)) == 64

    def test_temperature_in_logprob(self, engine: TransformersEngine) -> None:
        """The log-probability is of the tempered distribution and ignores top_k."""
        cold = Sampling(max_tokens=1, temperature=0.5, seed=3, top_k=1)
        hot = Sampling(max_tokens=1, temperature=2.0, seed=3, top_k=1)
        first, second = (engine.submit(PROMPTS[2], s).result(30).choices[0] for s in (cold, hot))
        assert first.token_ids == second.token_ids
        assert second.logprobs[0] < first.logprobs[0] < 0

    def test_tiny_nucleus_is_greedy(self, engine: TransformersEngine) -> None:
        """A nucleus smaller than the best token's share leaves only that token."""
        narrow = Sampling(max_tokens=6, top_p=1e-9, seed=5)
        assert (
            engine.submit(PROMPTS[1], narrow).result(30).choices[0].token_ids
            == engine.submit(PROMPTS[1], greedy(6)).result(30).choices[0].token_ids
        )


class TestEnds:
    def test_stop_token(self, engine: TransformersEngine) -> None:
        """A stop token ends the choice and is its last token."""
        free = engine.submit(PROMPTS[0], greedy(10, ignore_eos=True)).result(30).choices[0]
        stop = free.token_ids[4]
        cut = engine.submit(PROMPTS[0], greedy(10, stop_token_ids=(stop,))).result(30).choices[0]
        assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert cut.finish_reason == "stop"

    def test_stop_text(self, engine: TransformersEngine) -> None:
        """A stop text ends the choice; its tokens are there, its text is not."""
        free = engine.submit(PROMPTS[0], greedy(10, ignore_eos=True)).result(30).choices[0]
        stop = free.text[3:5]
        sampling = greedy(10, stop=(stop,), ignore_eos=True)
        cut = engine.submit(PROMPTS[0], sampling).result(30).choices[0]
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
        assert engine.decode(cut.token_ids).endswith(stop)


class TestUpdates:
    def test_update_while_decoding(self, engine: TransformersEngine, model_dir: Path) -> None:
        """Tokens after an update are the new weights' continuation of the old weights' cache."""
        paused = threading.Event()
        future = engine.submit(PROMPTS[0], greedy(100, ignore_eos=True))
        while engine.load().running == 0 and not future.done():
            paused.wait(0.001)
        install(engine, model_dir, seed=2, label=V2)
        choice = future.result(timeout=60).choices[0]
        assert [span.installed for span in choice.spans] == [V1, V2]
        first, second = choice.spans
        assert (first.start, first.end, second.end) == (0, second.start, 100)
        assert list(choice.token_ids) == self.by_hand(model_dir, PROMPTS[0], switch=first.end)

    @torch.no_grad()
    def by_hand(self, model_dir: Path, prompt: list[int], *, switch: int) -> list[int]:
        models = [tiny_model(model_dir, seed=seed, dtype=torch.float32) for seed in (1, 2)]
        out = models[0](torch.tensor([prompt]), use_cache=True)
        tokens = [int(out.logits[0, -1].argmax())]
        for at in range(1, 100):
            model = models[0] if at < switch else models[1]
            out = model(
                torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True
            )
            tokens.append(int(out.logits[0, -1].argmax()))
        return tokens

    def test_failed_write_keeps_label(self, engine: TransformersEngine) -> None:
        """What a write raises passes through and the old version is served on."""

        def write() -> None:
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            engine.at_safe_point(write, installed=V2, timeout_s=5)
        assert engine.installed() == V1
        assert engine.submit(PROMPTS[0], greedy(1)).result(30).choices[0].spans[0].installed == V1

    def test_uncertain_write_refuses(self, engine: TransformersEngine) -> None:
        """After a write whose undo failed nothing is served."""

        def write() -> None:
            raise UncertainStateError("half written")

        with pytest.raises(UncertainStateError):
            engine.at_safe_point(write, installed=V2, timeout_s=5)
        with pytest.raises(EngineNotReadyError):
            engine.submit(PROMPTS[0], greedy(1))

    def test_unlabelled_fails_those_in_flight(self, engine: TransformersEngine) -> None:
        """Requests in flight end with an error when the weights become unusable."""
        future = engine.submit(PROMPTS[0], greedy(100, ignore_eos=True))
        engine.at_safe_point(lambda: None, installed=None, timeout_s=5)
        with pytest.raises(EngineNotReadyError):
            future.result(timeout=30)

    def test_writer_has_a_deadline(self, engine: TransformersEngine) -> None:
        """A second writer gives up in time while the first one writes, and changes nothing."""
        entered, leave = threading.Event(), threading.Event()

        def write() -> None:
            entered.set()
            assert leave.wait(20)

        thread = threading.Thread(
            target=lambda: engine.at_safe_point(write, installed=V2, timeout_s=5)
        )
        thread.start()
        assert entered.wait(20)
        with pytest.raises(DeadlineExceededError):
            engine.at_safe_point(lambda: pytest.fail("ran"), installed=V2, timeout_s=0.01)
        leave.set()
        thread.join(20)
        assert engine.installed() == V2

    def test_nan_weights_fail_requests(self, engine: TransformersEngine) -> None:
        """Broken weights fail the request and leave the engine alive."""
        for buffer in engine.live_tensors().values():
            buffer.data[:] = b"\xff" * len(buffer.data)
        with pytest.raises(GenerationError):
            engine.submit(PROMPTS[0], greedy(2)).result(timeout=30)
        assert engine.installed() == V1


class TestAdmission:
    def test_refuses_before_first_version(self, model_dir: Path) -> None:
        """Random weights are never served."""
        engine = make_engine(model_dir)
        with pytest.raises(EngineNotReadyError):
            engine.submit(PROMPTS[0], greedy(1))
        engine.close(timeout_s=10)

    @pytest.mark.parametrize(
        ("prompt", "sampling", "field"),
        [
            ([], greedy(1), "prompt"),
            ([10_000], greedy(1), "prompt"),
            ([-1], greedy(1), "prompt"),
            ([1] * 100, greedy(29), "max_tokens"),
            ([1], greedy(1, n=33), "n"),
        ],
    )
    def test_bad_requests(
        self, engine: TransformersEngine, prompt: list[int], sampling: Sampling, field: str
    ) -> None:
        """What cannot be served is refused at once, and the field is named."""
        with pytest.raises(BadRequestError) as caught:
            engine.submit(prompt, sampling)
        assert caught.value.field == field

    def test_queue_is_bounded_and_cancel_frees(self, model_dir: Path) -> None:
        """A full queue refuses, and a cancelled request gives its place back."""
        engine = make_engine(model_dir, max_batch=1, max_waiting=1)
        gate, release = threading.Event(), threading.Event()

        def write() -> None:
            gate.set()
            assert release.wait(20)

        install(engine, model_dir, seed=1, label=V1)
        writer = threading.Thread(
            target=lambda: engine.at_safe_point(write, installed=V1, timeout_s=5)
        )
        writer.start()
        assert gate.wait(20)
        running = engine.submit(PROMPTS[0], greedy(2))
        while engine.load().waiting:
            gate.wait()
        waiting = engine.submit(PROMPTS[0], greedy(2))
        with pytest.raises(EngineBusyError):
            engine.submit(PROMPTS[0], greedy(2))
        assert waiting.cancel()
        third = engine.submit(PROMPTS[1], greedy(2))
        release.set()
        writer.join(20)
        assert running.result(30).choices
        assert third.result(30).choices
        with pytest.raises(CancelledError):
            waiting.result(1)
        engine.close(timeout_s=10)

    def test_close_fails_the_rest(self, engine: TransformersEngine) -> None:
        """Closing ends unfinished requests with an error instead of leaving them hanging."""
        futures = [engine.submit(p, greedy(100, ignore_eos=True)) for p in PROMPTS]
        engine.close(timeout_s=20)
        assert any(isinstance(f.exception(timeout=10), EngineNotReadyError) for f in futures)
        with pytest.raises(EngineNotReadyError):
            engine.submit(PROMPTS[0], greedy(1))


class TestBuilding:
    def test_tied_tensors_appear_once(self, engine: TransformersEngine) -> None:
        """A tied output layer is an alias; together names cover the whole state dict."""
        assert "lm_head.weight" in {*engine.live_tensors(), *engine.tensor_aliases()}
        assert len(engine.tensor_aliases()) == 1

    def test_not_a_model(self, tmp_path: Path) -> None:
        """A directory without a model is an error that names it."""
        with pytest.raises(PreflightError, match=str(tmp_path)):
            make_engine(tmp_path)

    @pytest.mark.parametrize(("device", "error"), [("meta", PreflightError), ("gpu", UsageError)])
    def test_devices_that_hold_no_weights(
        self, model_dir: Path, device: str, error: type[Exception]
    ) -> None:
        """A device that is none, or that keeps no bytes, is refused by its name."""
        with pytest.raises(error, match=device):
            make_engine(model_dir, device=device)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": ("",)},
    ],
)
def test_sampling_is_checked(changes: dict[str, object]) -> None:
    """A sampling that makes no sense cannot be made."""
    with pytest.raises(BadRequestError, match=next(iter(changes))):
        Sampling(**changes)  # type: ignore[arg-type]


def test_a_configuration_that_contradicts_itself_is_told(tmp_path: Path) -> None:
    """Whatever transformers makes of a bad config.json, it is one paragraph about that file."""
    write_tiny_qwen3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(PreflightError, match=r"does not hold a model .*config\.json"):
        load_model(EngineConfig(model_dir=tmp_path))


def test_more_threads_than_any_machine_has_are_refused(tmp_path: Path) -> None:
    """The math library would end the process when it cannot start them."""
    with pytest.raises(UsageError, match="at most 1024"):
        EngineConfig(model_dir=tmp_path, threads=100_000)
