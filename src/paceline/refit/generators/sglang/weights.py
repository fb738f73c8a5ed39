"""A copy of the server's weights on this side: verified here, and what changed is handed over.

The server's own parameters are fused and on another device; the copy has the checkpoint's names,
so that versions apply to it as to any engine.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.core.errors import PreflightError
from paceline.refit.model import TensorBuffer
from paceline.refit.staging.torch_bytes import DTYPE_WORDS, byte_view

CONFIG_FILES = ("config.json", "generation_config.json")
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Left out of checkpoints whose configuration ties them."""


class ShadowWeights:
    """Every tensor of a checkpoint in host memory, and which of them the server does not have."""

    def __init__(self, model_dir: Path) -> None:
        """Read the checkpoint that the server was started from.

        Raises:
            PreflightError: there is none, or a tensor that versions cannot name.
        """
        self._model_dir = model_dir
        self._tensors = _read_checkpoint(model_dir)
        self._sent: dict[str, bytes] = {}
        self.live: Mapping[str, TensorBuffer] = {
            name: byte_view(name, tensor) for name, tensor in self._tensors.items()
        }
        self.aliases: Mapping[str, str] = _aliases(model_dir, self._tensors)

    def changed(self) -> tuple[Sequence[str], Mapping[str, bytes]]:
        """Return the tensors that differ from what the server has, and the marks of all."""
        marks = {name: xxhash.xxh3_128_digest(each.data) for name, each in self.live.items()}
        names = [name for name, mark in marks.items() if self._sent.get(name) != mark]
        return names, marks

    def note_sent(self, marks: Mapping[str, bytes]) -> None:
        """Take note that the server has what ``marks`` say."""
        self._sent = dict(marks)

    def forget_sent(self) -> None:
        """What the server has is not known: everything goes next time."""
        self._sent = {}

    def write(self, names: Sequence[str], folder: Path) -> None:
        """Write tensors as a checkpoint that the server can load. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in CONFIG_FILES:
            if (self._model_dir / name).exists():
                shutil.copyfile(self._model_dir / name, folder / name)
        save_file({name: self._tensors[name] for name in names}, folder / "model.safetensors")


def read_limits(model_dir: Path) -> tuple[int, int]:
    """Return the sizes of vocabulary and context. Raises PreflightError."""
    config = _config(model_dir)
    try:
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as exc:
        raise PreflightError(
            f"{model_dir}/config.json lacks vocab_size or max_position_embeddings"
        ) from exc


def _config(model_dir: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError) as exc:
        raise PreflightError(f"{model_dir} holds no readable config.json: {exc}") from exc
    if not isinstance(config, dict):
        raise PreflightError(f"{model_dir}/config.json is no object")
    return config


def _read_checkpoint(model_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise PreflightError(
            f"{model_dir} holds no .safetensors; engine 'sglang' wants the directory that the "
            "server was started with (--model-path)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as exc:
            raise PreflightError(f"{file} cannot be read: {exc}") from exc
        tensors |= {name: tensor.clone() for name, tensor in found.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_WORDS:
            raise PreflightError(f"{name} has dtype {tensor.dtype}, which manifests cannot name")
    return tensors


def _aliases(model_dir: Path, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
    alias, owner = TIED
    is_tied = _config(model_dir).get("tie_word_embeddings") is True
    return {alias: owner} if is_tied and alias not in tensors and owner in tensors else {}
