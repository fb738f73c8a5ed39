"""Live weights served where they lie: nothing is copied, so nothing may move meanwhile.

The price of no copy: from staging to release the optimizer must not step. The hook
``before_step`` refuses instead of corrupting, and a fingerprint finds out who stepped anyway.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.refit.digest import content_digest
from paceline.refit.errors import NoFreeArenaError, StagingError
from paceline.refit.kernels.registry import process_tools
from paceline.refit.model import TensorBuffer, TensorEntry


class InPlaceGuard:
    """One version at a time may be served from live memory."""

    def __init__(
        self, *, fingerprint: Callable[[], object], live: Callable[[], Mapping[str, TensorBuffer]]
    ) -> None:
        """Watch live memory.

        Args:
            fingerprint: something cheap that changes when weights are written, such as torch's
                version counters; not every way of writing changes it.
            live: the live tensors, as views.
        """
        self._fingerprint = fingerprint
        self._live = live
        self._held: tuple[Mapping[str, TensorBuffer], object] | None = None
        self._entries: Mapping[str, TensorEntry] = {}

    @property
    def is_held(self) -> bool:
        """Whether a version is served from live memory now."""
        return self._held is not None

    def hold(self) -> None:
        """Let nothing move from now on; reads nothing. Raises NoFreeArenaError while held."""
        self._refuse_if_held("another version cannot be staged in place")
        self._held, self._entries = (self._live(), self._fingerprint()), {}

    def describe(self) -> Mapping[str, TensorBuffer]:
        """Digest what is held, and return it. Raises StagingError if it moved meanwhile."""
        if self._held is None:
            raise StagingError("nothing is staged in place")
        buffers, _ = self._held
        digests = _digests(buffers.values())
        self._entries = {
            name: TensorEntry(
                name=name,
                dtype=item.dtype,
                shape=item.shape,
                digest=digest,
                num_bytes=len(item.data),
            )
            for (name, item), digest in zip(buffers.items(), digests, strict=True)
        }
        self.verify(by_digest=False)
        return buffers

    def stage(self) -> Mapping[str, TensorBuffer]:
        """Hold and describe. Raises StagingError while it is held already."""
        self.hold()
        return self.describe()

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """What the held version is."""
        return self._entries

    def verify(self, *, by_digest: bool) -> None:
        """Refuse if the weights moved since staging: serving them would break the version.

        Args:
            by_digest: read all bytes again; otherwise the fingerprint alone is compared.

        Raises:
            StagingError: naming the first tensor that moved.
        """
        if self._held is None:
            raise StagingError("nothing is staged in place")
        moved = [] if self._fingerprint() == self._held[1] else ["the version counters"]
        if by_digest:
            live = self._live()
            now = _digests([live[name] for name in self._entries])
            before = self._entries.values()
            moved = [
                entry.name
                for entry, digest in zip(before, now, strict=True)
                if digest != entry.digest
            ] or moved
        if moved:
            raise StagingError(
                f"weights staged in place were written to ({moved[0]} moved); discard the "
                "version, and call before_step() before every optimizer step"
            )

    def before_step(self) -> None:
        """Refuse an optimizer step while a version is served from live memory."""
        self._refuse_if_held("the optimizer must not step")

    def release(self) -> None:
        """Let the weights move again; idempotent. Only when no lease lives."""
        self._held, self._entries = None, {}

    def _refuse_if_held(self, consequence: str) -> None:
        if self._held is not None:
            raise NoFreeArenaError(
                f"live weights are being served in place, so {consequence}; release that "
                "version first, or stage with COPY_TO_HOST"
            )


def _digests(buffers: Iterable[TensorBuffer]) -> Sequence[str]:
    """Hash tensors side by side."""
    return list(process_tools().run(lambda item: content_digest(item.data), buffers))
