"""A real causal language model small enough for a test: Qwen3 in shape, 64 characters of text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from paceline.refit.model import TensorBuffer

CHARACTERS = "0123456789+-=*/()., abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<end>", "<unk>")


def write_tiny_qwen3(directory: Path, *, tie_word_embeddings: bool = True, **sizes: int) -> Path:
    """Write ``config.json`` and a tokenizer of single characters, no weights; returns the place.

    Args:
        directory: made if it is not there.
        tie_word_embeddings: whether ``lm_head`` is the embedding.
        sizes: fields of Qwen3Config that are to be others, e.g. ``head_dim``.
    """
    tokenizer = tiny_tokenizer()
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        **{**shape, **sizes},
    )
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


MIXTURES: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, int]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}


def write_tiny_moe(directory: Path, *, family: str = "qwen3_moe", **given: int) -> Path:
    """Write the same for a mixture of four experts, two of which see each token."""
    tokenizer = tiny_tokenizer()
    config_class, own = MIXTURES[family]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
    config = config_class(
        architectures=[config_class.__name__.replace("Config", "ForCausalLM")],
        vocab_size=len(tokenizer),
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **{**sizes, **own, **given},
    )
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per character."""
    words = [*SPECIAL, *CHARACTERS]
    pad, end, unknown = SPECIAL
    core = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token=unknown))
    core.pre_tokenizer = Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token=end, unk_token=unknown
    )


def tiny_model(directory: Path, *, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model of ``write_tiny_qwen3`` with weights that the seed decides."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=stream)
            # Norms stay near 1; the rest is loud enough for continuations that differ.
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.eval()


def write_weights(live: Mapping[str, TensorBuffer], model: torch.nn.Module) -> None:
    """Overwrite live bytes with a model's, as an install does; call it at a safe point."""
    wanted = model.state_dict()
    for name, buffer in live.items():
        buffer.data[:] = wanted[name].reshape(-1).view(torch.uint8).numpy().data
