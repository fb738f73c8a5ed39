"""Which staged shards an object server serves, when versions may share an object.

Object ids are digests, so two versions with equal payloads (two empty deltas, the same full
weights) are one object in the server. Its memory belongs to whoever served it first; it may be
given back only when nobody needs the object any more.
"""

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.refit.staging.shard import StagedBuffers
from paceline.refit.transports.protocol import ObjectServer

_Owner = TypeVar("_Owner")


class ServedShards(Generic[_Owner]):
    """Counts who needs which object; safe from several threads."""

    def __init__(self, server: ObjectServer) -> None:
        self._server = server
        self._needed: dict[str, int] = {}
        self._waiting: list[tuple[_Owner, StagedBuffers]] = []
        """Withdrawn, but an object of theirs is still needed by another shard."""
        self._lock = threading.Lock()

    def serve(self, buffers: StagedBuffers) -> None:
        """Make the objects of a shard readable."""
        with self._lock:
            for item in buffers.objects:
                self._needed[item.object_id] = self._needed.get(item.object_id, 0) + 1
                self._server.serve_object(item.object_id, item.parts)

    def abandon(self, buffers: StagedBuffers) -> None:
        """Withdraw what was made readable of a shard that is not going to be served.

        Raises:
            StagingError: a reader does not leave.
        """
        with self._lock:
            for item in buffers.objects:
                if not self._needed.get(item.object_id):
                    self._server.withdraw_object(item.object_id)

    def withdraw(self, owner: _Owner, buffers: StagedBuffers) -> Sequence[_Owner]:
        """Stop serving a shard and return the owners whose memory nobody is inside any more.

        Raises:
            StagingError: a reader does not leave; nothing is counted down, try again later.
        """
        with self._lock:
            for item in buffers.objects:
                if self._needed[item.object_id] == 1:
                    self._server.withdraw_object(item.object_id)
            for item in buffers.objects:
                self._needed[item.object_id] -= 1
            waiting = [*self._waiting, (owner, buffers)]
            self._waiting = [each for each in waiting if self._is_needed(each[1])]
            return [each[0] for each in waiting if not self._is_needed(each[1])]

    def _is_needed(self, buffers: StagedBuffers) -> bool:
        return any(self._needed[item.object_id] for item in buffers.objects)
