"""A trainer sends the codes and scales that quantised engines serve, and deltas over those."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.apply import prove_live, stage_install, write_install
from paceline.refit.delta.choice import Link
from paceline.refit.errors import StagingError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import (
    StagedWeightVersionShardData,
    TensorBuffer,
    TensorEntry,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.quantise import FP8_BLOCK, fp8_block, int8_channel, quantiser
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
POLICY = {"*.up": "fp8-block", "*.down": "int8-channel"}


def weights(seed: int, rows: int, columns: int, size: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size


@given(
    st.integers(0, 99),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([1e-42, 1e-30, 0.02, 1e30]),
)
def test_fp8_blocks_come_back(seed: int, rows: int, columns: int, size: float) -> None:
    """Codes times the scale of their block are the weights, to half a step of the format."""
    given_weights = weights(seed, rows, columns, size)
    found = fp8_block("w", given_weights)
    scales = found["w_scale_inv"]
    assert scales.shape == (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    wide = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :columns]
    back = found["w"].double() * wide.double()
    error = (back - given_weights.double()).abs()
    assert bool((error <= given_weights.double().abs() / 16 + wide.double() * 2**-10).all())


@given(st.integers(0, 99), st.integers(1, 50), st.integers(1, 50))
def test_int8_rows_come_back(seed: int, rows: int, columns: int) -> None:
    """Codes times the scale of their row are the weights, to half a code."""
    given_weights = weights(seed, rows, columns)
    found = int8_channel("w", given_weights)
    back = found["w"].double() * found["w_scale"].double()
    assert bool(((back - given_weights.double()).abs() <= found["w_scale"].double() * 0.501).all())


def test_zeros_and_borders() -> None:
    """A block of zeros has scale 1; the largest weight of a block is the largest code."""
    block = torch.zeros(130, 130)
    block[0, 0], block[129, 129] = -3.0, 5.0
    found = fp8_block("w", block)
    assert found["w_scale_inv"][0, 1] == 1
    assert found["w"].float()[0, 0] == -448
    assert found["w"].float()[129, 129] == 448
    assert int(found["w"].float().count_nonzero()) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", [fp8_block, int8_channel])
def test_what_is_not_finite_is_refused(scheme: object, bad: float) -> None:
    """One NaN would be hidden by a code; the error names the tensor."""
    broken = torch.ones(2, 2)
    broken[1, 1] = bad
    with pytest.raises(StagingError, match=r"'layer\.w'"):
        scheme("layer.w", broken)  # type: ignore[operator]


def test_policies_say_which_tensors() -> None:
    """Globs pick matrices; norms, integers and other names are sent as they are."""
    quantise = quantiser({"head.*": "int8-channel", "*.weight": "fp8-block"})
    assert set(quantise("a.weight", torch.ones(2, 2)) or ()) == {"a.weight", "a.weight_scale_inv"}
    assert set(quantise("head.weight", torch.ones(2, 2)) or ()) == {
        "head.weight",
        "head.weight_scale",
    }
    assert quantise("a.weight", torch.ones(4)) is None
    assert quantise("a.weight", torch.ones(2, 2, dtype=torch.int64)) is None
    assert quantise("a.bias", torch.ones(2, 2)) is None
    with pytest.raises(ValueError, match="known: fp8-block, int8-channel"):
        quantiser({"*": "fp4"})


class Engine:
    """Live tensors that follow a trainer, byte for byte."""

    def __init__(self) -> None:
        self.live: dict[str, TensorBuffer] = {}
        self.base: dict[str, TensorEntry] | None = None

    def install(self, staged: StagedWeightVersionShardData) -> None:
        """Install a staged version and prove what is then live."""
        manifest = parse_manifest(staged.manifest.data)
        assert isinstance(staged.buffer_owner, StagedBuffers)
        objects = {
            item.object_id: memoryview(b"".join(item.parts)) for item in staged.buffer_owner.objects
        }
        for entry in manifest.tensors:
            room = memoryview(bytearray(entry.num_bytes))
            empty = TensorBuffer(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=room)
            self.live.setdefault(entry.name, empty)
        install = stage_install(manifest, objects, live=self.live, aliases={}, base=self.base)
        write_install(install, prove=True)
        assert prove_live(self.live, install.entries) == manifest.root_digest
        self.base = {entry.name: entry for entry in install.entries}


def test_trainer_sends_codes_and_scales_as_deltas() -> None:
    """An engine that follows by deltas holds the codes of the newest weights, byte for byte."""
    tensors = {
        "a.up": weights(1, 150, 200).bfloat16(),
        "a.down": weights(2, 20, 30),
        "a.norm": torch.ones(30),
    }
    trainer = TorchModuleTrainer(
        clock=FakeClock(),
        wire_dtypes={"*": "BF16"},
        quantise=quantiser(POLICY),
        link=Link(bits_per_s=1e6),
    )
    assert TrainerStagingMode.IN_PLACE not in trainer.supported_staging_modes
    trainer.bind_tensors(tensors)
    engine = Engine()
    for payload in (FULL, DELTA, DELTA):
        staged = trainer.stage_shard(
            tensors=None, staging_mode=TrainerStagingMode.COPY_TO_HOST, payload_format=payload
        )
        engine.install(staged)
        live = engine.live
        trainer.commit_staged(staged)
        wanted = {**fp8_block("a.up", tensors["a.up"]), **int8_channel("a.down", tensors["a.down"])}
        wanted["a.norm"] = tensors["a.norm"].bfloat16()
        assert {name: bytes(item.data) for name, item in live.items()} == {
            name: bytes(item.reshape(-1).view(torch.uint8).tolist())
            for name, item in wanted.items()
        }
        assert live["a.up"].dtype == "F8_E4M3"
        assert live["a.up_scale_inv"].dtype == "F32"
        with torch.no_grad():
            tensors["a.up"][3, 4:9] += 0.01
            tensors["a.down"][0, 0] = 7.0


def test_clashing_names_and_ties_are_refused() -> None:
    """Codes that would take another tensor's name, or speak for a tied one, are refused."""
    one = torch.ones(2, 2)
    for tensors, words in (
        ({"x.up": one, "x.up_scale_inv": torch.ones(1)}, "there already"),
        ({"x.up": one, "y.up": one}, "tied"),
    ):
        trainer = TorchModuleTrainer(clock=FakeClock(), quantise=quantiser(POLICY))
        with pytest.raises(ValueError, match=words):
            trainer.bind_tensors(tensors)


def test_a_slow_link_makes_deltas_smaller() -> None:
    """The link that the run names decides between fast and small."""
    sizes, schemes = {}, {}
    for name, link in (("fast", Link(bits_per_s=20e9)), ("slow", Link(bits_per_s=1e6))):
        tensors = {"w": weights(5, 1000, 1000).bfloat16()}
        trainer = TorchModuleTrainer(clock=FakeClock(), link=link)
        trainer.bind_tensors(tensors)
        for payload in (FULL, DELTA):
            staged = trainer.stage_shard(
                tensors=None, staging_mode=TrainerStagingMode.COPY_TO_HOST, payload_format=payload
            )
            trainer.commit_staged(staged)
            tensors["w"] += weights(6, 1000, 1000, 5e-6)
        (segment,) = parse_manifest(staged.manifest.data).segments
        sizes[name], schemes[name] = segment.num_bytes, segment.scheme
    assert schemes == {"fast": Scheme.GAP, "slow": Scheme.CLASSED}
    assert sizes["slow"] < sizes["fast"]
