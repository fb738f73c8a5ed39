"""What every trainer engine must do: inherit, implement ``make``, and all claims are tested.

A receiver without an engine takes what was staged, from manifest bytes and objects alone, and
must end up with the very bytes that the trainer holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from paceline.refit.apply import Checks, prove_live, stage_install, write_install
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.v1 import Lora, Manifest
from paceline.refit.model import (
    StagedWeightVersionShardData,
    TensorBuffer,
    TensorEntry,
    TrainerStagingMode,
    WeightPayloadFormat,
)
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsAnchors, SupportsChain, TrainerEngineAdapter

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A trainer adapter with its tensors bound, and the loop around it."""

    trainer: TrainerEngineAdapter
    step: Callable[[], None]
    """Changes some elements of some tensors, as an optimizer does."""
    wire_bytes: Callable[[], Mapping[str, bytes]]
    """Returns what every tensor is on the wire now, by canonical name."""


class Follower:
    """A rollout engine reduced to its bytes."""

    def __init__(self) -> None:
        self._live: dict[str, TensorBuffer] = {}
        self._base: dict[str, TensorEntry] | None = None
        self._lora: Lora | None = None

    def install(self, staged: StagedWeightVersionShardData) -> Manifest:
        """Take a version as a receiver does, prove it, and return its manifest."""
        manifest = parse_manifest(staged.manifest.data)
        if not self._live:
            self._lora = manifest.lora
            self._live = {entry.name: _empty(entry) for entry in manifest.tensors}
        objects = {
            item.object_id: memoryview(b"".join(item.parts)) for item in buffers_of(staged).objects
        }
        install = stage_install(
            manifest,
            objects,
            live=self._live,
            aliases=dict(manifest.aliases),
            base=self._base,
            checks=Checks(lora=self._lora),
        )
        write_install(install)
        assert prove_live(self._live, install.entries) == manifest.root_digest
        self._base = {entry.name: entry for entry in install.entries}
        return manifest

    def live_bytes(self) -> dict[str, bytes]:
        """Return a copy of what is live."""
        return {name: bytes(buffer.data) for name, buffer in self._live.items()}


class TrainerContract(ABC):
    """Claims about staging, for any trainer engine with FULL_TENSOR, XOR_DELTA, COPY_TO_HOST."""

    @abstractmethod
    def make(self) -> Training:
        """Return a fresh trainer whose tensors are bound."""

    @pytest.fixture
    def training(self) -> Training:
        """Return a fresh trainer."""
        return self.make()

    def test_signs_its_protocols(self, training: Training) -> None:
        """It has a slot, and commits, discards and releases."""
        assert isinstance(training.trainer, TrainerEngineAdapter)
        assert isinstance(training.trainer, SupportsChain)
        assert training.trainer.source_slot_id
        assert {FULL, DELTA} <= training.trainer.supported_payload_formats
        assert TrainerStagingMode.COPY_TO_HOST in training.trainer.supported_staging_modes

    def test_full_then_deltas_arrive_bit_for_bit(self, training: Training) -> None:
        """A full version and the deltas after it make a follower equal, one by one."""
        follower = Follower()
        for number in range(4):
            staged = stage(training, DELTA if number else FULL)
            chain(training).commit_staged(staged)
            manifest = follower.install(staged)
            assert follower.live_bytes() == dict(training.wire_bytes())
            assert manifest.source_slot_id == training.trainer.source_slot_id
            assert (manifest.base_root is None) == (number == 0)
            chain(training).release_staged(staged)
            training.step()

    def test_staged_bytes_stay_still(self, training: Training) -> None:
        """What was staged is what it was, whatever the optimizer did since."""
        wanted, staged = dict(training.wire_bytes()), stage(training, FULL)
        chain(training).commit_staged(staged)
        training.step()
        later = stage(training, DELTA)
        chain(training).commit_staged(later)
        training.step()
        follower = Follower()
        follower.install(staged)
        assert follower.live_bytes() == wanted != dict(training.wire_bytes())

    def test_a_discarded_version_is_no_base(self, training: Training) -> None:
        """After a version that was staged and never committed the next delta spans both steps."""
        follower = Follower()
        first = stage(training, FULL)
        chain(training).commit_staged(first)
        follower.install(first)
        training.step()
        lost = stage(training, DELTA)
        chain(training).discard_staged(lost)
        training.step()
        follower.install(stage(training, DELTA))
        assert follower.live_bytes() == dict(training.wire_bytes())

    def test_no_change_is_an_empty_delta(self, training: Training) -> None:
        """A delta without a change has no segments and the root of its base."""
        first = stage(training, FULL)
        chain(training).commit_staged(first)
        manifest = parse_manifest(stage(training, DELTA).manifest.data)
        assert manifest.segments == ()
        assert manifest.root_digest == manifest.base_root

    def test_the_first_version_is_full(self, training: Training) -> None:
        """A delta before anything was committed is refused."""
        with pytest.raises(ValueError, match="FULL_TENSOR"):
            stage(training, DELTA)

    def test_giving_back_is_final_and_idempotent(self, training: Training) -> None:
        """Released bytes can be released again, and never become a base."""
        staged = stage(training, FULL)
        chain(training).release_staged(staged)
        chain(training).release_staged(staged)
        chain(training).discard_staged(staged)
        with pytest.raises(ValueError, match="given back"):
            chain(training).commit_staged(staged)

    @pytest.mark.parametrize(
        ("mode", "payload_format"),
        [
            (TrainerStagingMode.UNSPECIFIED, FULL),
            (TrainerStagingMode.COPY_TO_HOST, WeightPayloadFormat.UNSPECIFIED),
        ],
    )
    def test_unspecified_is_refused(
        self, training: Training, mode: TrainerStagingMode, payload_format: WeightPayloadFormat
    ) -> None:
        """Nothing is guessed."""
        with pytest.raises(ValueError, match="UNSPECIFIED"):
            training.trainer.stage_shard(
                tensors=None, staging_mode=mode, payload_format=payload_format
            )

    def test_an_anchor_equals_what_was_committed(self, training: Training) -> None:
        """Where anchors are supported, one is the full version of the last committed state."""
        if not isinstance(training.trainer, SupportsAnchors):
            return
        first = stage(training, FULL)
        chain(training).commit_staged(first)
        wanted = dict(training.wire_bytes())
        training.step()
        follower = Follower()
        manifest = follower.install(training.trainer.stage_committed())
        assert follower.live_bytes() == wanted
        assert manifest.root_digest == parse_manifest(first.manifest.data).root_digest


def stage(training: Training, payload_format: WeightPayloadFormat) -> StagedWeightVersionShardData:
    """Stage in host memory and wait until the bytes are still."""
    staged = training.trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=payload_format,
    )
    staged.publish_ready.wait()
    return staged


def chain(training: Training) -> SupportsChain:
    """Return the trainer as what commits and releases."""
    assert isinstance(training.trainer, SupportsChain)
    return training.trainer


def buffers_of(staged: StagedWeightVersionShardData) -> StagedBuffers:
    """Return what the publisher serves."""
    assert isinstance(staged.buffer_owner, StagedBuffers)
    return staged.buffer_owner


def _empty(entry: TensorEntry) -> TensorBuffer:
    data = memoryview(bytearray(entry.num_bytes))
    return TensorBuffer(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=data)
