"""What is cast is what was asked for, rounded as torch rounds; everything else keeps its bits."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.refit.errors import StagingError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.staging.torch_bytes import WORD_DTYPES
from paceline.refit.trainers.dtypes import (
    KEEP,
    ROUTERS,
    DtypePolicy,
    Sent,
    Unmatched,
    WireDtypes,
    summarise,
)
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import Follower
from paceline.testing.corpus import corpus

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
QUIET_BITS = 0x7FFFFFFF
INFINITY = 0x7F800000


def trainer_of(tensors: Any, wire_dtypes: WireDtypes = None) -> TorchModuleTrainer:
    trainer = TorchModuleTrainer(clock=FakeClock(), wire_dtypes=wire_dtypes)
    trainer.bind_tensors(tensors)
    return trainer


def stage(trainer: TorchModuleTrainer, payload_format: WeightPayloadFormat = FULL) -> Any:
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=payload_format,
    )
    staged.publish_ready.wait()
    return staged


def arrives(tensors: Any, wire_dtypes: WireDtypes = None) -> dict[str, bytes]:
    """Return what an engine holds after a full version."""
    follower = Follower()
    follower.install(stage(trainer_of(tensors, wire_dtypes)))
    return follower.live_bytes()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def nearest_even(word: int) -> int:
    """Return the bf16 word of an fp32 word that is no NaN, by whole numbers alone."""
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
@settings(max_examples=60)
def test_rounding_is_torchs_and_to_nearest_even(words: list[int]) -> None:
    """Any fp32 word becomes what torch makes of it, wherever it stands in a tensor."""
    masters = torch.tensor(words, dtype=torch.uint32).view(torch.float32)
    found = torch.frombuffer(
        bytearray(arrives({"w": masters}, {"*": "BF16"})["w"]), dtype=torch.uint16
    ).tolist()
    assert found == masters.to(torch.bfloat16).view(torch.uint16).tolist()
    for word, there in zip(words, found, strict=True):
        if word & QUIET_BITS > INFINITY:
            assert there & 0x7FFF > INFINITY >> 16, "a NaN stays one"
        else:
            assert there == nearest_even(word)


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_what_no_rule_casts_keeps_its_bits(case: Any) -> None:
    """NaN payloads, signs of zero and subnormals of every dtype pass a policy that keeps them."""
    dtype = WORD_DTYPES[case.dtype]
    tensor = torch.frombuffer(bytearray(case.new or b"\0" * 8), dtype=torch.uint8)
    tensor = tensor[: len(case.new)].view(dtype).view(case.shape)
    policy = DtypePolicy(rules={"kept": KEEP, "*": "BF16"})
    assert arrives({"kept": tensor}, policy)["kept"] == case.new
    if not dtype.is_floating_point:
        assert arrives({"w": tensor}, policy)["w"] == case.new


@given(word=st.sampled_from(["F32", "F64"]), values=st.lists(st.integers(0, 2**16 - 1), min_size=1))
def test_a_wider_dtype_is_exact(word: str, values: list[int]) -> None:
    """A bf16 weight that travels wider comes back as it was, unless it is a NaN."""
    held = torch.tensor(values, dtype=torch.uint16).view(torch.bfloat16)
    found = torch.frombuffer(bytearray(arrives({"w": held}, {"*": word})["w"]), dtype=torch.uint8)
    back = found.view(WORD_DTYPES[word]).to(torch.bfloat16)
    same = back.view(torch.int16) == held.view(torch.int16)
    assert bool((same | held.isnan()).all())
    assert bool((back.isnan() == held.isnan()).all())


class Mixture(torch.nn.Module):
    """Masters of everything that a policy tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.up = torch.nn.Linear(8, 8)
        self.register_buffer("scales", torch.tensor([0.1, 0.2]))
        self.register_buffer("steps", torch.tensor(2**24 + 1))


def dtypes_of(trainer: TorchModuleTrainer) -> dict[str, str]:
    manifest = parse_manifest(stage(trainer).manifest.data)
    return {entry.name: entry.dtype for entry in manifest.tensors}


def test_routers_buffers_and_integers_are_kept() -> None:
    """The ready policy rounds parameters; what picks experts and what is no parameter stays."""
    model = torch.nn.ModuleDict({"mlp": Mixture()})
    trainer = trainer_of(model, DtypePolicy.everything("BF16"))
    assert dtypes_of(trainer) == {
        "mlp.gate.weight": "F32",
        "mlp.up.weight": "BF16",
        "mlp.up.bias": "BF16",
        "mlp.scales": "F32",
        "mlp.steps": "I64",
    }
    found = {row.name: (row.sent, row.decided_by) for row in trainer.sent}
    assert found["mlp.gate.weight"] == ("F32", ROUTERS[1])
    assert found["mlp.scales"] == ("F32", "buffer")
    assert found["mlp.up.bias"] == ("BF16", "*")
    assert found["mlp.steps"] == ("I64", "no float")


def test_a_master_that_no_rule_names_is_refused_or_kept() -> None:
    """Which of the two is said, and what is refused is named with the way out."""
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "h": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"'b' is F32.*KEEP"):
        trainer_of(tensors, DtypePolicy(rules={"a": "BF16"}))
    kept = DtypePolicy(rules={"a": "BF16"}, unmatched=Unmatched.KEEP)
    wanted = {"a": "BF16", "b": "F32", "h": "BF16"}
    assert dtypes_of(trainer_of(tensors, kept)) == wanted
    assert dtypes_of(trainer_of(tensors, {"a": "BF16"})) == wanted, "a mapping keeps the rest"
    with pytest.raises(ValueError, match=r"one of .*KEEP"):
        DtypePolicy(rules={"*": "bf16"})


def test_buffers_are_cast_where_that_is_said() -> None:
    """A policy can reach buffers, and a mapping alone always did."""
    buffers = DtypePolicy(rules={"*": "BF16"}, casts_buffers=True)
    for policy in (buffers, {"*": "BF16"}):
        assert dtypes_of(trainer_of(Mixture(), policy))["scales"] == "BF16"


@pytest.mark.parametrize(("word", "largest"), [("F16", 65504.0), ("F8_E5M2", 57344.0)])
def test_a_weight_that_does_not_fit_stops_the_version(word: str, largest: float) -> None:
    """What the smaller range cannot hold is no infinity on the wire; the largest that fits goes."""
    weights = torch.tensor([1.0, largest])
    trainer = trainer_of({"w": weights}, {"*": word})
    stage(trainer)
    weights[0] = 1e9
    with pytest.raises(StagingError, match=rf"'w'.*{word} cannot hold"):
        stage(trainer)
    weights[0] = 2.0
    stage(trainer)


@pytest.mark.parametrize("word", ["F32", "BF16"])
def test_a_double_that_does_not_fit_stops_the_version(word: str) -> None:
    """For masters of fp64 every other dtype is the smaller one."""
    weights = torch.tensor([1.0, 3e38], dtype=torch.float64)
    trainer = trainer_of({"w": weights}, {"*": word})
    stage(trainer)
    weights[0] = 1e39
    with pytest.raises(StagingError, match=rf"'w'.*{word} cannot hold"):
        stage(trainer)


def test_a_policy_that_casts_nothing_lets_weights_be_served_in_place() -> None:
    """Bits are kept, so live memory is what is sent."""
    place = TrainerStagingMode.IN_PLACE
    keep, cast = DtypePolicy(rules={"*": KEEP}), DtypePolicy(rules={"*": "BF16"})
    assert place in trainer_of({"w": torch.ones(2)}, keep).supported_staging_modes
    assert place not in trainer_of({"w": torch.ones(2)}, cast).supported_staging_modes


def test_the_report_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever starts a run sees what is rounded, once."""
    with caplog.at_level(logging.INFO, logger="paceline.refit.trainers.torch_module"):
        trainer = trainer_of(Mixture(), DtypePolicy.everything("BF16"))
    line = summarise(trainer.sent)
    assert line in caplog.text
    assert "F32 rounded to BF16: 3 tensors" in line
    rows = [Sent(name="w", held="F32", sent="F32", decided_by="x", num_elements=2**20)]
    assert summarise(rows) == "F32 kept: 1 tensors, 4 MiB"


def stochastic_step(weights: torch.Tensor, generator: torch.Generator) -> None:
    """Add noise to bf16 weights as an optimizer without masters does: rounded by chance."""
    update = torch.randn(weights.shape, generator=generator) * 1e-2
    words = (weights.float() + update).view(torch.int32)
    words += torch.randint(0, 2**16, words.shape, generator=generator, dtype=torch.int32)
    weights.copy_((words & -(2**16)).view(torch.float32).to(torch.bfloat16))


def test_weights_that_are_rounded_by_chance_travel_dense() -> None:
    """Most words move; the version is still exact, and never larger than the weights."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(256, 256, generator=generator).bfloat16()
    still = torch.ones(500, dtype=torch.bfloat16)
    trainer, follower = trainer_of({"w": weights, "still": still}), Follower()
    first = stage(trainer)
    trainer.commit_staged(first)
    follower.install(first)
    for _ in range(3):
        stochastic_step(weights, generator)
        staged = stage(trainer, DELTA)
        trainer.commit_staged(staged)
        manifest = follower.install(staged)
        (segment,) = manifest.segments
        assert segment.scheme in {Scheme.DENSE, Scheme.RAW}
        assert segment.changed_elements > 0.5 * weights.numel()
        assert segment.num_bytes <= weights.nbytes
        assert follower.live_bytes()["w"] == raw(weights)
