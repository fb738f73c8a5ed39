"""Installs one version into a file of weights and dies at the write it is told to die at."""

import mmap
import os
import sys
from pathlib import Path
from typing import Any

from paceline.refit.apply import stage_install, write_install
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.loops import NumpyLoops
from paceline.refit.delta.order import WordKind, Words
from paceline.refit.delta.steps import Steps
from paceline.refit.journal import FileJournal
from paceline.refit.model import TensorBuffer
from paceline.testing.payloads import delta_payload, tensor_entry

COUNT = 300


class Dying:
    """Counts writes; the last one that is allowed is done by half."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def write(self, whole: Any, half: Any) -> None:
        """Do the whole, or half and die."""
        self.left -= 1
        if self.left == 0:
            half()
            os._exit(9)
        whole()


class DyingLoops(NumpyLoops):
    """Loops whose write may be the last."""

    def __init__(self, dying: Dying) -> None:
        self.dying = dying

    def add(self, steps: Steps, words: Words, kind: WordKind, **options: Any) -> None:
        """Write, perhaps only the first half."""

        def whole() -> None:
            super(DyingLoops, self).add(steps, words, kind, **options)

        def half() -> None:
            before = words.copy()
            whole()
            words[len(words) // 2 :] = before[len(words) // 2 :]

        self.dying.write(whole, half)


class DyingFile:
    """A file of which only what was synced is there after the crash, or all of it."""

    def __init__(self, file: Any, dying: Dying) -> None:
        self.file = file
        self.dying = dying

    def write(self, data: bytes) -> None:
        """Write, perhaps only the first half."""

        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.dying.write(lambda: self.file.write(data), half)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def tensors(data: memoryview) -> dict[str, TensorBuffer]:
    """Three tensors of a file: two change by steps, one as a whole."""
    size = 2 * COUNT
    return {
        name: TensorBuffer(
            name=name, dtype="BF16", shape=(COUNT,), data=data[i * size : (i + 1) * size]
        )
        for i, name in enumerate("abc")
    }


def main(folder: Path, nth: int) -> None:
    """Install ``new`` over ``weights``, which are ``old``, and die at the n-th write."""
    old = tensors(memoryview(bytearray((folder / "old").read_bytes())))
    new = tensors(memoryview(bytearray((folder / "new").read_bytes())))
    dying = Dying(nth)
    with (folder / "weights").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        live = tensors(memoryview(mapped))
        manifest, data = delta_payload(old, new)
        staged = stage_install(
            manifest,
            {manifest.objects[0].object_id: memoryview(data)},
            live=live,
            aliases={},
            base={name: tensor_entry(item) for name, item in old.items()},
        )
        assert [write.steps is None for write in staged.writes] == [False, True, False]

        def flush() -> None:
            dying.write(mapped.flush, lambda: None)

        journal = FileJournal(folder / "journal", live=live, flush=flush)
        journal._file = DyingFile(journal._file, dying)  # type: ignore[assignment]  # noqa: SLF001
        write_install(staged, tools=Tools(loops=DyingLoops(dying)), journal=journal)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
