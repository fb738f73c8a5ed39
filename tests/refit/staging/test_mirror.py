"""Versions reach tensors on a device and their copies: both are old, or both are new.

Tensors here are in host memory too, apart from their copies; loops for devices are forced on them.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from paceline.refit.apply import StagedInstall, stage_install
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.loops import NumpyLoops
from paceline.refit.errors import ApplyError, UncertainStateError, VerifyError
from paceline.refit.generators.protocol import SupportsDeviceTensors
from paceline.refit.kernels.protocol import Compacted
from paceline.refit.kernels.registry import load_device_loops
from paceline.refit.manifest.v1 import Scheme
from paceline.refit.model import TensorBuffer
from paceline.refit.staging.mirror import DeviceInstall, prove_device
from paceline.refit.staging.torch_bytes import WORD_DTYPES
from paceline.testing.corpus import corpus
from paceline.testing.payloads import delta_payload, full_payload, tensor_entry

TORCH = load_device_loops("torch")
KINDS = ["full", "delta", "xor"]


def state(which: str) -> dict[str, TensorBuffer]:
    """The corpus as one model, before or after."""
    return {
        case.name: TensorBuffer(
            name=case.name,
            dtype=case.dtype,
            shape=case.shape,
            data=memoryview(bytearray(getattr(case, which))),
        )
        for case in corpus()
    }


def tensor_of(item: TensorBuffer) -> torch.Tensor:
    """A tensor with the same bits, of its own."""
    dtype = WORD_DTYPES[item.dtype]
    if not len(item.data):
        return torch.empty(item.shape, dtype=dtype)
    return torch.frombuffer(bytearray(item.data), dtype=dtype).view(item.shape)


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: b"" if not item.numel() else item.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, item in tensors.items()
    }


class Engine:
    """Weights of an engine: on the device, and their copies."""

    def __init__(self) -> None:
        self.copies = state("base")
        self.tensors = {name: tensor_of(item) for name, item in self.copies.items()}
        self.before = self.content()
        new = state("new")
        self.after = {name: bytes(item.data) for name, item in new.items()}

    def content(self) -> dict[str, bytes]:
        """What is on the device; the copies must be equal."""
        found = bits(self.tensors)
        assert found == {name: bytes(item.data) for name, item in self.copies.items()}
        return found

    def device_tensors(self) -> Mapping[str, torch.Tensor]:
        """Sign SupportsDeviceTensors."""
        return self.tensors

    def staged(self, kind: str) -> StagedInstall:
        """Prove the version after, as one kind of payload."""
        new = state("new")
        schemes = dict.fromkeys(new, Scheme.XOR) if kind == "xor" else None
        manifest, data = (
            full_payload(new.values())
            if kind == "full"
            else delta_payload(self.copies, new, scheme_of=schemes)
        )
        return stage_install(
            manifest,
            {manifest.objects[0].object_id: memoryview(data)},
            live=self.copies,
            aliases={},
            base={name: tensor_entry(item) for name, item in self.copies.items()},
        )


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_arrives_in_both(kind: str) -> None:
    """By steps and by whole words, in every dtype of the corpus; nothing moves before the write."""
    engine = Engine()
    staged = engine.staged(kind)
    install = DeviceInstall(staged, engine.tensors, tools=Tools(), pick=lambda _: TORCH)
    assert engine.content() == engine.before
    install.write()
    assert engine.content() == engine.after
    prove_device(engine.tensors, staged.entries)
    assert isinstance(engine, SupportsDeviceTensors)


class Breaking:
    """Loops whose n-th move fails, before or after it was made."""

    name = "breaking"

    def __init__(self, nth: int, *, is_late: bool) -> None:
        self.left = nth
        self.is_late = is_late

    def compact(self, old: torch.Tensor, new: torch.Tensor) -> Compacted:
        """Return what differs."""
        return TORCH.compact(old, new)

    def move(self, *arguments: Any, **more: Any) -> None:
        """Fail at the n-th."""
        self.left -= 1
        if self.left or self.is_late:
            TORCH.move(*arguments, **more)
        if not self.left:
            raise RuntimeError("the device is tired")


class BreakingCopy(NumpyLoops):
    """Loops on the copies whose third write fails."""

    writes = 0

    def add(self, *arguments: Any, **more: Any) -> None:
        """Fail once."""
        self.writes += 1
        if self.writes == 3:
            raise RuntimeError("the host is tired")
        super().add(*arguments, **more)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_device_that_fails_leaves_the_old_version(nth: int, is_late: bool) -> None:
    """Whichever move fails, before or after its words: both are as they were, and can try again."""
    engine = Engine()
    loops = Breaking(nth, is_late=is_late)
    install = DeviceInstall(
        engine.staged("delta"), engine.tensors, tools=Tools(), pick=lambda _: loops
    )
    with pytest.raises(ApplyError, match="device is tired"):
        install.write()
    assert engine.content() == engine.before
    DeviceInstall(engine.staged("delta"), engine.tensors, tools=Tools()).write()
    assert engine.content() == engine.after


def test_a_copy_that_fails_takes_the_device_back() -> None:
    """The device was written already when the copy fails."""
    engine = Engine()
    tools = Tools(loops=BreakingCopy())
    install = DeviceInstall(engine.staged("delta"), engine.tensors, tools=tools)
    with pytest.raises(ApplyError, match="host is tired"):
        install.write()
    assert engine.content() == engine.before


def test_a_device_that_cannot_go_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither old nor new: nothing may be served."""
    engine = Engine()
    loops = Breaking(2, is_late=False)
    install = DeviceInstall(
        engine.staged("delta"), engine.tensors, tools=Tools(), pick=lambda _: loops
    )

    def refuse(*_: object) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(torch.Tensor, "copy_", refuse)
    with pytest.raises(UncertainStateError, match=r"tired.*gone"):
        install.write()


def test_a_device_with_another_base_is_refused_before_the_pause() -> None:
    """One bit on the device, where a step meets it; elsewhere the proof finds it."""
    engine = Engine()
    staged = engine.staged("delta")
    name = next(
        write.name for write in staged.writes if write.dtype == "BF16" and write.steps is not None
    )
    raw = engine.tensors[name].reshape(-1).view(torch.uint8)
    raw ^= 1
    before = bits(engine.tensors)
    with pytest.raises(VerifyError, match="not those of its copy"):
        DeviceInstall(staged, engine.tensors, tools=Tools())
    assert bits(engine.tensors) == before
    with pytest.raises(VerifyError, match="digest"):
        prove_device(engine.tensors, (tensor_entry(item) for item in engine.copies.values()))
