"""Live weights served where they lie: nothing is copied, so nothing may move meanwhile.

The price of no copy: from staging to release the optimizer must not step. The hook
``before_step`` refuses instead of corrupting, and a fingerprint finds out who stepped anyway.
"""

from collections.abc import Callable, Mapping

from paceline.refit.digest import content_digest
from paceline.refit.errors import StagingError
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
        self._staged: tuple[Mapping[str, TensorEntry], object] | None = None

    @property
    def is_held(self) -> bool:
        """Whether a version is served from live memory now."""
        return self._staged is not None

    def stage(self) -> Mapping[str, TensorBuffer]:
        """Describe live memory and hold it. Raises StagingError while it is held already."""
        self._refuse_if_held("another version cannot be staged in place")
        buffers = self._live()
        fingerprint = self._fingerprint()
        entries = {
            name: TensorEntry(
                name=name,
                dtype=item.dtype,
                shape=item.shape,
                digest=content_digest(item.data),
                num_bytes=len(item.data),
            )
            for name, item in buffers.items()
        }
        self._staged = (entries, fingerprint)
        return buffers

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """What the held version is."""
        return self._staged[0] if self._staged else {}

    def verify(self, *, by_digest: bool) -> None:
        """Refuse if the weights moved since staging: serving them would break the version.

        Args:
            by_digest: read all bytes again; otherwise the fingerprint alone is compared.

        Raises:
            StagingError: naming the first tensor that moved.
        """
        if self._staged is None:
            raise StagingError("nothing is staged in place")
        entries, fingerprint = self._staged
        moved = [] if self._fingerprint() == fingerprint else ["the version counters"]
        if by_digest:
            live = self._live()
            moved = [
                name
                for name, entry in entries.items()
                if content_digest(live[name].data) != entry.digest
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
        self._staged = None

    def _refuse_if_held(self, consequence: str) -> None:
        if self._staged is not None:
            raise StagingError(
                f"live weights are being served in place, so {consequence}; release that "
                "version first, or stage with COPY_TO_HOST"
            )
