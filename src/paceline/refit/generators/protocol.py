"""What a rollout engine signs so that verified weights can become its live parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.refit.model import TensorBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVersion:
    """What the live parameters are, exactly."""

    version_id: str
    sequence: int
    root_digest: str


class GeneratorEngineAdapter(Protocol):
    """The live parameters of one rollout engine.

    The receiver calls from its own thread. Between calls the engine may run forward passes at
    any time; inside ``at_safe_point`` it runs none.
    """

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return every distinct tensor by canonical name, as writable views of the live bytes.

        The same memory each time, for the life of the engine. Tied names appear once, see
        ``tensor_aliases``.
        """
        ...

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return further names of a tensor -> the canonical one."""
        ...

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run ``write`` while no forward pass runs and return the seconds no pass could start.

        If ``write`` returns, ``installed`` is what the engine serves from the next pass on
        (None: it must refuse to serve). If it raises, the label stays and the error passes.

        Raises:
            DeadlineExceededError: no safe point within ``timeout_s``; ``write`` did not run.
        """
        ...

    def installed(self) -> InstalledVersion | None:
        """Return what is served, None before the first install or in an uncertain state."""
        ...
