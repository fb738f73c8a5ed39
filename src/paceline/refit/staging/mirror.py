"""A proven version is written into parameters on a device, and into their copy in host memory.

Everything is proven against the copy, as for any engine. What changes is compared with the words
on the device and is there, as places and steps, before the engine pauses: the pause moves changed
elements only, wherever they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from paceline.refit.apply import StagedInstall, write_install
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.order import WordKind, Words, as_words, kind_of
from paceline.refit.delta.steps import Steps, differences_of, positions_of
from paceline.refit.digest import content_digest
from paceline.refit.errors import ApplyError, UncertainStateError, VerifyError
from paceline.refit.kernels.protocol import DeviceLoops
from paceline.refit.kernels.registry import PickLoops, load_device_loops, loops_on
from paceline.refit.manifest.fit import dense_part
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.staging.device import words_of
from paceline.refit.writing import TensorWrite, updates_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Move:
    """The steps of one chunk, on the device."""

    words: torch.Tensor
    at: torch.Tensor
    steps: torch.Tensor
    is_float: bool
    loops: DeviceLoops


class DeviceInstall:
    """A staged version on its way into a device and into the copy."""

    def __init__(
        self,
        staged: StagedInstall,
        tensors: Mapping[str, torch.Tensor],
        *,
        tools: Tools,
        pick: PickLoops = loops_on,
    ) -> None:
        """Bring what changes to the device; nothing that is live is written.

        Args:
            staged: proven against the copies, which are its live memory.
            tensors: those that live on a device; others are written in host memory alone.
            tools: what the work on the copies is done with.
            pick: loops by type of device.

        Raises:
            VerifyError: the device does not hold the base.
        """
        self._staged = staged
        self._tools = tools
        self._words = {
            write.name: words_of(tensors[write.name], kind_of(write.dtype))
            for write in staged.writes
            if write.name in tensors
        }
        self._moves: list[_Move] = []
        for write in staged.writes:
            if write.name in self._words and write.steps is not None:
                self._moves += self._proven(write, pick)

    def write(self) -> None:
        """Write the device, then the copy; or leave both as they were.

        Raises:
            ApplyError: it failed and was taken back.
            UncertainStateError: taking it back failed too.
        """
        try:
            for move in self._moves:
                move.loops.move(move.words, move.at, move.steps, is_float=move.is_float)
            for write in self._staged.writes:
                if write.name in self._words and write.steps is None:
                    self._write_whole(write)
            _settle(self._words.values())
            write_install(self._staged, tools=self._tools)
        except UncertainStateError:
            raise  # the copy is lost: there is nothing to go back to
        except BaseException as exc:
            self._go_back(exc)
            if isinstance(exc, ApplyError) or not isinstance(exc, Exception):
                raise
            raise ApplyError(
                f"writing version {self._staged.root_digest[:12]} to the device failed and was "
                f"undone ({exc}); the version before is live, the install can be tried again"
            ) from exc

    def _proven(self, write: TensorWrite, pick: PickLoops) -> Iterable[_Move]:
        kind, words = kind_of(write.dtype), self._words[write.name]
        loops = pick(words.device.type) or load_device_loops("torch")
        for update in write.steps or ():
            steps = update.new
            assert isinstance(steps, Steps)  # noqa: S101 - what is written by steps has no words
            at = torch.from_numpy(positions_of(steps.gaps)).to(words.device)
            here = words[update.part]
            before = self._tools.loops.take(steps, write.live[update.part])
            if not torch.equal(here[at], _on(here, before, kind)):
                raise VerifyError(
                    f"tensor {write.name!r}: the words on {words.device} are not those of its copy "
                    "in host memory; install a full version"
                )
            yield _Move(
                words=here,
                at=at,
                steps=_on(here, differences_of(steps), kind),
                is_float=kind.is_sign_magnitude,
                loops=loops,
            )

    def _write_whole(self, write: TensorWrite) -> None:
        kind, words = kind_of(write.dtype), self._words[write.name]
        for update in updates_of(write, self._tools):
            assert not isinstance(update.new, Steps)  # noqa: S101 - those are moves
            words[update.part].copy_(_on(words, update.new, kind))

    def _go_back(self, cause: BaseException) -> None:
        """Copy the tensors back, whole: which elements were written is not known."""
        try:
            for write in self._staged.writes:
                if write.name in self._words:
                    words = self._words[write.name]
                    words.copy_(_on(words, write.live, kind_of(write.dtype)))
            _settle(self._words.values())
        except BaseException as exc:
            raise UncertainStateError(
                f"writing to the device failed ({cause}) and so did taking it back ({exc}); "
                "install a full version before serving again"
            ) from exc


def refresh_device(tensors: Mapping[str, torch.Tensor], copies: Mapping[str, TensorBuffer]) -> None:
    """Make tensors on a device what their copies are, whatever they are now.

    Raises:
        UncertainStateError: a device failed.
    """
    try:
        for name, tensor in tensors.items():
            kind = kind_of(copies[name].dtype)
            words = words_of(tensor, kind)
            words.copy_(_on(words, as_words(copies[name].data, kind.width), kind))
        _settle(tensors.values())
    except Exception as exc:
        raise UncertainStateError(
            f"the weights could not be brought to their device ({exc}); start the engine again"
        ) from exc


def prove_device(tensors: Mapping[str, Any], entries: Iterable[TensorEntry]) -> None:
    """Read tensors back from their device and hash them.

    Raises:
        VerifyError: one is not what its entry says.
    """
    there = sorted((each for each in entries if each.name in tensors), key=lambda each: each.name)
    for name, parts in groupby(there, key=lambda each: each.name):
        tensor = tensors[name]
        for entry in parts:
            words = words_of(tensor, kind_of(entry.dtype)).cpu()
            data = words.view(torch.uint8).numpy().data
            whole = TensorBuffer(name=name, dtype=entry.dtype, shape=tuple(tensor.shape), data=data)
            if content_digest(dense_part(whole, entry).data) != entry.digest:
                raise VerifyError(
                    f"tensor {entry.name!r} on its device does not have the digest of this version"
                )


def _on(place: torch.Tensor, words: Words, kind: WordKind) -> torch.Tensor:
    """Bring words to where ``place`` is, as the same signed integers."""
    data = words if words.flags.writeable else words.copy()
    return torch.from_numpy(data.view(f"<i{kind.width}")).to(place.device)


def _settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices: what they failed at is known only then."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
