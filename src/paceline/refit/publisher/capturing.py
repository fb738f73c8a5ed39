"""The part of a publish that training stands for: keep the weights as they are, or do without.

Who has to let go when all memory is in use is decided here, from the policy.
"""

from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.refit.errors import NoFreeArenaError, PublishError, VersionSkippedError
from paceline.refit.model import StagedWeightVersionShardData, WeightPayloadFormat
from paceline.refit.publisher.line import Line
from paceline.refit.publisher.shelf import VersionShelf
from paceline.refit.publisher.values import PublisherOptions, WhenLeased
from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.trainers.protocol import SupportsCapture, SupportsChain, TrainerEngineAdapter

_POLL_S = 0.1


class Capturer:
    """Captures for one publisher; without a shelf nothing but captures can be let go."""

    def __init__(
        self,
        *,
        trainer: TrainerEngineAdapter,
        line: Line,
        shelf: VersionShelf | None,
        clock: Clock,
        options: PublisherOptions,
    ) -> None:
        self._trainer = trainer
        self._line = line
        self._shelf = shelf
        self._clock = clock
        self._options = options

    def prepare(self) -> None:
        """Have ready what the next one needs."""
        if isinstance(self._trainer, SupportsCapture):
            self._trainer.prepare(payload_format=self._options.wanted)

    def capture(self, *, needs_full: Callable[[], bool]) -> object:
        """Keep the weights as they are now; while nothing is free, do as the policy says.

        ``needs_full`` is asked for adapters that cannot leave the rest for later.

        Raises:
            NoFreeArenaError: nothing came free in ``stage_wait_s``.
            VersionSkippedError: the policy says so.
            StagingError: the bytes cannot be kept still.
        """
        deadline = self._clock.monotonic() + self._options.stage_wait_s
        has_released = False
        while True:
            try:
                return self._try_once(needs_full=needs_full)
            except NoFreeArenaError as exc:
                if not has_released and self._shelf is not None:
                    self._shelf.release()
                    has_released = True
                    continue
                policy = self._options.when_leased
                if policy is WhenLeased.SKIP:
                    raise VersionSkippedError(f"this version was left out: {exc}") from exc
                if policy is WhenLeased.DROP and self._let_go():
                    continue
                left_s = deadline - self._clock.monotonic()
                if left_s < _POLL_S:
                    raise
                self._wait_a_little(left_s)

    def stage(
        self, captured: object, payload_format: WeightPayloadFormat
    ) -> StagedWeightVersionShardData:
        """Make a shard of a capture, and wait until its bytes are where they have to be."""
        if isinstance(captured, StagedWeightVersionShardData):
            staged = captured
        else:
            assert isinstance(self._trainer, SupportsCapture)  # noqa: S101 - it captured this
            staged = self._trainer.stage_captured(captured, payload_format=payload_format)
        try:
            staged.publish_ready.wait()
        except BaseException:
            buffers = staged.buffer_owner
            if self._shelf is not None and isinstance(buffers, StagedBuffers):
                self._shelf.abandon(buffers)  # an upload may have got half way
            self._chain.discard_staged(staged)
            raise
        return staged

    def give_back(self, captured: object) -> None:
        """Forget a capture that is not to be staged."""
        if isinstance(captured, StagedWeightVersionShardData):
            self._chain.discard_staged(captured)
        elif isinstance(self._trainer, SupportsCapture):
            self._trainer.drop_captured(captured)

    @property
    def _chain(self) -> SupportsChain:
        assert isinstance(self._trainer, SupportsChain)  # noqa: S101 - the publisher has seen to it
        return self._trainer

    def _try_once(self, *, needs_full: Callable[[], bool]) -> object:
        options = self._options
        wanted = options.wanted
        if isinstance(self._trainer, SupportsCapture):
            return self._trainer.capture(staging_mode=options.staging_mode, payload_format=wanted)
        # It knows one way only, and its base is that of the last version that came out.
        if not self._line.wait_idle(options.publish_wait_s):
            raise PublishError("the version before is still underway; publish less often")
        is_first = needs_full() and wanted is WeightPayloadFormat.XOR_DELTA
        return self._trainer.stage_shard(
            tensors=None,
            staging_mode=options.staging_mode,
            payload_format=WeightPayloadFormat.FULL_TENSOR if is_first else wanted,
        )

    def _let_go(self) -> bool:
        """Let the oldest version go that nobody needs; False if there is none."""
        if self._line.drop_oldest():
            return True
        return self._shelf is not None and self._shelf.drop_oldest_unleased()

    def _wait_a_little(self, left_s: float) -> None:
        """Wait for a publication to end, and without one for leases to.

        Whoever ended a publication has released what could be. Asking again here would have
        training stand for a control service that does not answer.
        """
        if self._line.wait_for_one(left_s):
            return
        self._clock.sleep(_POLL_S)
        if self._shelf is not None and not self._line.is_working:
            self._shelf.release()
