"""The transformers engine tells of tokens as they come, and can repeat itself exactly."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.refit.generators.protocol import ChoicePiece, Generation, Sampling
from paceline.refit.generators.transformers.cache import ROOM_COLUMNS, RoomyLayer
from paceline.refit.generators.transformers.engine import TransformersEngine
from refit.generators.test_transformers import PROMPTS, V1, V2, install, make_engine, model_dir

__all__ = ["model_dir"]


@pytest.fixture
def engine(model_dir: Path) -> Iterator[TransformersEngine]:
    made = make_engine(model_dir)
    install(made, model_dir, seed=1, label=V1)
    yield made
    made.close(timeout_s=10)


def stream(
    engine: TransformersEngine, prompt: list[int], sampling: Sampling
) -> tuple[list[ChoicePiece], Generation]:
    pieces: list[ChoicePiece] = []
    generation = engine.submit_stream(prompt, sampling, pieces.append).result(30)
    return pieces, generation


class TestPieces:
    def test_joined_they_are_the_choice(self, engine: TransformersEngine) -> None:
        """Tokens, log-probabilities, text and spans of all pieces are those of the answer."""
        sampling = Sampling(max_tokens=12, n=3, seed=5, ignore_eos=True)
        pieces, generation = stream(engine, PROMPTS[0], sampling)
        assert generation == engine.submit(PROMPTS[0], sampling).result(30)
        for index, choice in enumerate(generation.choices):
            mine = [piece for piece in pieces if piece.index == index]
            assert tuple(t for piece in mine for t in piece.token_ids) == choice.token_ids
            assert tuple(p for piece in mine for p in piece.logprobs) == choice.logprobs
            assert "".join(piece.text for piece in mine) == choice.text
            assert [piece.finish_reason for piece in mine] == [None] * 11 + ["length"]
            assert [(s.start, s.end) for piece in mine for s in piece.spans] == [
                (at, at + 1) for at in range(12)
            ]

    def test_a_stop_text_is_not_shown(self, engine: TransformersEngine) -> None:
        """What may be the beginning of a stop is held back, and the stop itself is never sent."""
        greedy = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
        text = engine.submit(PROMPTS[2], greedy).result(30).choices[0].text
        stop = text[4:7]
        pieces, generation = stream(engine, PROMPTS[2], replace(greedy, stop=(stop,)))
        assert generation.choices[0].finish_reason == pieces[-1].finish_reason == "stop"
        assert "".join(piece.text for piece in pieces) == text[: text.find(stop)]
        assert generation.choices[0].text == text[: text.find(stop)]

    def test_across_an_update(self, engine: TransformersEngine, model_dir: Path) -> None:
        """A choice that sees an update tells of both versions as it goes."""
        first, go_on, seen = threading.Event(), threading.Event(), list[ChoicePiece]()

        def take(piece: ChoicePiece) -> None:
            seen.append(piece)
            first.set()
            go_on.wait(30)  # the engine stands between two passes

        future = engine.submit_stream(PROMPTS[0], Sampling(max_tokens=100, ignore_eos=True), take)
        assert first.wait(30)
        install(engine, model_dir, seed=2, label=V2)
        go_on.set()
        spans = future.result(30).choices[0].spans
        assert [span.installed for span in spans] == [V1, V2]
        cut = spans[0].end
        told = [span.installed for piece in seen for span in piece.spans]
        assert told == [V1] * cut + [V2] * (100 - cut)

    def test_a_consumer_that_is_gone(self, engine: TransformersEngine) -> None:
        """Whoever can take nothing any more costs nobody else anything."""

        def gone(piece: ChoicePiece) -> None:
            raise RuntimeError("Event loop is closed")

        lost = engine.submit_stream(PROMPTS[0], Sampling(max_tokens=100), gone)
        assert engine.submit(PROMPTS[1], Sampling(max_tokens=5)).result(30).choices
        assert lost.cancelled()


class TestReproducible:
    def test_whoever_runs_beside(self, model_dir: Path) -> None:
        """Tokens and log-probabilities are equal to the last bit, alone or in any company."""
        engine = make_engine(model_dir, reproducible=True)
        install(engine, model_dir, seed=1, label=V1)
        sampling = Sampling(max_tokens=20, seed=7, n=2, ignore_eos=True)
        alone = engine.submit(PROMPTS[0], sampling).result(30)
        for company in (1, 5):
            others = [
                engine.submit(PROMPTS[at % 4], Sampling(max_tokens=9 + at)) for at in range(company)
            ]
            assert engine.submit(PROMPTS[0], sampling).result(30) == alone
            for other in others:
                assert other.result(30).choices
        engine.close(timeout_s=10)

    def test_equals_the_batch_in_tokens(self, engine: TransformersEngine, model_dir: Path) -> None:
        """Passes of one's own give what the batch gives, up to rounding."""
        solo = make_engine(model_dir, reproducible=True)
        install(solo, model_dir, seed=1, label=V1)
        greedy = Sampling(max_tokens=10, temperature=0, n=2, ignore_eos=True)
        futures = [(engine.submit(p, greedy), solo.submit(p, greedy)) for p in PROMPTS]
        for batched, own in futures:
            assert [c.token_ids for c in batched.result(30).choices] == [
                c.token_ids for c in own.result(30).choices
            ]
        solo.close(timeout_s=10)


def test_a_cache_is_written_in_place() -> None:
    """Tokens are written behind what is there; all is copied only when the room is used up."""
    layer, reference = RoomyLayer(), torch.empty(2, 3, 0, 4)
    places: set[int] = set()
    for at in range(3 * ROOM_COLUMNS):
        new = torch.randn(2, 3, 5 if at == 0 else 1, 4)
        reference = torch.cat([reference, new], dim=2)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, reference)
        assert torch.equal(values, -reference)
        places.add(keys.data_ptr())
    assert len(places) <= 4
    layer.keys, layer.values = layer.keys[:1, :, 7:], layer.values[:1, :, 7:]
    keys, _ = layer.update(torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4))
    assert torch.equal(keys[:, :, :-1], reference[:1, :, 7:])
