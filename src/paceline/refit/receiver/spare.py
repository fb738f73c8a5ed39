"""The second set of an engine's weights: written and proven while the engine serves the first.

At any moment the live set is one version whole. The spare one may be anything; what it is known
to hold is remembered by its digests, and forgotten before the first word of it is written. So
whatever fails, the next install brings it level with the live set again, by copying.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from paceline.refit.apply import StagedInstall, check_live, write_install
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.order import as_words, kind_of
from paceline.refit.errors import ApplyError, RefitError, UncertainStateError, VerifyError
from paceline.refit.generators.protocol import SpareWeights
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.refit.writing import TensorWrite

log = logging.getLogger(__name__)

Content: TypeAlias = frozenset[tuple[str, str]]
"""Key and digest of every entry: what a set holds, however the version was cut into shards."""


class SpareSet:
    """What is done with a second set of weights, none of it inside a pause but ``exchange``."""

    def __init__(
        self,
        weights: SpareWeights,
        *,
        live: Callable[[], Mapping[str, TensorBuffer]],
        tools: Tools,
    ) -> None:
        self._weights = weights
        self._live = live
        self._tools = tools
        self._holds: Content | None = None
        """Of what the spare set holds for certain."""
        self._live_holds: Content | None = None
        """Of what the live set held when the spare one was level with it; None: it was not."""

    def forget(self) -> None:
        """Take the spare set for unknown: it is copied anew before it is used."""
        self._holds = None

    def levelled(self, base: Mapping[str, TensorEntry] | None) -> Mapping[str, TensorBuffer]:
        """Return the spare tensors, made equal to the live ones if those are known and the same.

        Raises:
            VerifyError: the copy is not what ``base`` says, so the live set is not either.
        """
        self._live_holds = None
        if base is not None and self._is_alike():
            self._live_holds = _content(base.values())
            if self._holds != self._live_holds:
                self._copy_live(base)
        return self._weights.tensors()

    def _is_alike(self) -> bool:
        """Say whether the sets have the same tensors: a LoRA may be followed by one of others."""
        layouts = [
            {name: (each.dtype, each.shape) for name, each in tensors.items()}
            for tensors in (self._live(), self._weights.tensors())
        ]
        return layouts[0] == layouts[1]

    def write(self, staged: StagedInstall, *, whole: bool) -> str:
        """Write a version that was staged against the spare set, and return its root digest.

        Args:
            staged: what to write.
            whole: hash every byte of the set behind the writes.

        Raises:
            ApplyError, VerifyError: it failed; the live set was not touched.
        """
        self._holds = None
        try:
            write_install(staged, tools=self._tools, prove=whole)
        except UncertainStateError as exc:
            raise ApplyError(
                f"the spare set of weights is lost and will be copied from the live one: {exc}"
            ) from exc
        names = {entry.name for entry in staged.entries} if whole else set()
        proven = () if staged.scatters else staged.changed_names  # scattered from proven copies
        check_live(
            self._weights.tensors(),
            staged.entries,
            only=sorted(names.difference(proven)),
            tools=self._tools,
        )
        self._holds = _content(staged.entries)
        return staged.root_digest

    def exchange(self) -> None:
        """Make the written set the live one; for the safe point."""
        self._weights.exchange()
        self._holds = self._live_holds

    def follow(self, staged: StagedInstall, *, whole: bool) -> None:
        """Bring the set that was live to what is live now, by the same changes.

        A failure costs the next install a copy and nothing else; that the set was damaged while it
        was live is told.
        """
        try:
            if self._holds is None or staged.has_parts:
                self._copy_live({entry.key: entry for entry in staged.entries})
                return
            writes = tuple(map(self._aimed, staged.writes))
            self.write(replace(staged, writes=writes), whole=whole)
        except VerifyError as exc:
            log.error("weights were damaged while they were served, until now: %s", exc)  # noqa: TRY400
        except RefitError as exc:
            log.warning("the spare set of weights could not follow: %s", exc)

    def _aimed(self, write: TensorWrite) -> TensorWrite:
        buffer = self._weights.tensors()[write.name]
        return replace(write, live=as_words(buffer.data, kind_of(buffer.dtype).width))

    def _copy_live(self, entries: Mapping[str, TensorEntry]) -> None:
        self._holds = None
        live, spare = self._live(), self._weights.tensors()

        def copy(name: str) -> None:  # by numpy, which lets the engine's thread run meanwhile
            source, target = (np.frombuffer(each[name].data, np.uint8) for each in (live, spare))
            np.copyto(target, source)

        for _ in self._tools.run(copy, list(spare)):
            pass
        check_live(spare, entries.values(), tools=self._tools)
        self._holds = _content(entries.values())


def _content(entries: Iterable[TensorEntry]) -> Content:
    return frozenset((entry.key, entry.digest) for entry in entries)
