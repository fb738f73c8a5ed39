"""Keys and values with room behind them: a token is written into place instead of copying all."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

ROOM_COLUMNS = 64
"""Copied once per so many tokens, when the room is used up."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # the library has no types here
    """One layer's cache; ``keys`` and ``values`` may be replaced by whoever cuts or joins rows."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._keys = _Room()
        self._values = _Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns and return everything."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._keys.extended(self.keys, key_states)
        self.values = self._values.extended(self.values, value_states)
        return self.keys, self.values

    def crop(self, max_length: int) -> None:
        """Keep the first columns."""
        if self.is_initialized:
            self.keys = self._keys.cut(self.keys, max_length)
            self.values = self._values.cut(self.values, max_length)


def crop_cache(cache: Cache, columns: int) -> None:
    """Forget what is behind the first ``columns``; the room stays."""
    for layer in cache.layers:
        layer.crop(columns)


def new_cache() -> Cache:
    """Return an empty cache that grows by layers as a model asks."""
    return Cache(layer_class_to_replicate=RoomyLayer)


class _Room:
    """A buffer and the part of it that is in use."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self._used: torch.Tensor | None = None

    def extended(self, now: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return [rows, heads, columns, size] of ``now`` with the columns of ``new`` behind it."""
        width = now.shape[-2] if now.numel() else 0
        grown = width + new.shape[-2]
        if now is not self._used or grown > self._buffer.shape[-2]:
            rows, heads, _, size = new.shape
            columns = -(-(grown + 1) // ROOM_COLUMNS) * ROOM_COLUMNS
            self._buffer = new.new_empty(rows, heads, columns, size)
            if width:
                self._buffer[:, :, :width] = now
        self._buffer[:, :, width:grown] = new
        self._used = self._buffer[:, :, :grown]
        return self._used

    def cut(self, now: torch.Tensor, width: int) -> torch.Tensor:
        """Return the first columns of ``now``, in the room if they are there."""
        if now is not self._used:
            return now[:, :, :width]
        self._used = self._buffer[:, :, : min(width, now.shape[-2])]
        return self._used
