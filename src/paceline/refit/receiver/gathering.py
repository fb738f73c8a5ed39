"""All slots of one version, fetched side by side: their sources are different machines."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.refit.errors import TransferCancelledError, VerifyError
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import Shard
from paceline.refit.parts import FetchedShard
from paceline.refit.receiver.fetch import Fetcher

AT_A_TIME_MAX = 4
"""Each holds a window in memory."""


class Turns:
    """Calls between reads, one at a time; once one has raised, all of them do."""

    def __init__(self, *between_reads: Callable[[], None]) -> None:
        """Take what is to be called, one after another."""
        self._between_reads = between_reads
        self._lock = threading.Lock()
        self._is_over = False

    def stop(self) -> None:
        """End whoever still reads, at the next call."""
        self._is_over = True

    def __call__(self) -> None:
        """Do the call. Raises TransferCancelledError after ``stop``."""
        with self._lock:
            if self._is_over:
                raise TransferCancelledError("another slot of the version could not be had")
            for call in self._between_reads:
                call()


def fetch_slots(
    manifests: Mapping[str, Manifest],
    fetchers: Mapping[str, Fetcher],
    sources: Mapping[str, Sequence[Shard]],
    *,
    turns: Turns,
    bytes_max: int,
    at_a_time: int = AT_A_TIME_MAX,
) -> list[FetchedShard]:
    """Return every slot's objects, proven; in the order of ``manifests``.

    Args:
        manifests: by slot, proven to be of one version.
        fetchers: by slot.
        sources: by slot.
        turns: what the fetchers call between reads.
        bytes_max: more than this cannot be right for all of them together.
        at_a_time: how many slots are read side by side.

    Raises:
        FetchError, VerifyError: of the first slot that could not be had; the others are ended.
    """
    total = sum(item.num_bytes for each in manifests.values() for item in each.objects)
    if total > bytes_max:
        raise VerifyError(f"the payload is {total} bytes; at most {bytes_max} can be right")

    def fetch(slot: str) -> FetchedShard:
        try:
            objects = fetchers[slot].fetch_objects(
                manifests[slot], sources[slot], bytes_max=bytes_max
            )
        except BaseException:
            turns.stop()
            raise
        return FetchedShard(manifest=manifests[slot], objects=objects)

    width = min(at_a_time, len(manifests))
    if width == 1:
        return [fetch(slot) for slot in manifests]
    with ThreadPoolExecutor(width, thread_name_prefix="slot") as pool:
        futures = [pool.submit(fetch, slot) for slot in manifests]
    _raise_cause(futures)
    return [future.result() for future in futures]


def _raise_cause(futures: Sequence[Future[FetchedShard]]) -> None:
    """Raise why it failed, if it did, before what only followed from that."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, TransferCancelledError))
    if errors:
        raise errors[0]
