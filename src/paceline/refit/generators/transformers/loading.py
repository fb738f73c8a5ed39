"""From a directory to a model that has no weights yet, a tokenizer and the limits of both."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.generators.protocol import EngineConfig
from paceline.refit.generators.transformers.quantised import hold_codes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layers whose state is keys and values per position, which is what the batch can pad and cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode and what one must know to run it."""

    model: torch.nn.Module
    tokenizer: Any
    vocabulary_size: int
    context_size: int
    end_ids: frozenset[int]


def load_model(config: EngineConfig) -> LoadedModel:
    """Build the model of ``config.model_dir``; its parameters are random until a version is in.

    Where versions are LoRAs, the parameters are those of the directory's files.

    Never touches the network and never runs code from the directory.

    Raises:
        UsageError: unknown dtype.
        PreflightError: no usable model or tokenizer there.
    """
    dtype = DTYPES.get(config.dtype)
    if dtype is None:
        raise UsageError(f"unknown dtype {config.dtype!r}; known: {', '.join(sorted(DTYPES))}")
    if not config.model_dir.is_dir():
        raise PreflightError(f"{config.model_dir} is no directory; --model wants one of a model")
    try:
        described = AutoConfig.from_pretrained(config.model_dir, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(config.model_dir, local_files_only=True)
        model = _read(config, dtype) if config.lora else _build(described, dtype)
        hold_codes(model, config.quantised)
    except UsageError:
        raise
    except Exception as exc:  # transformers raises what its many validators raise
        raise PreflightError(
            f"{config.model_dir} does not hold a model that transformers can build "
            f"(config.json and a tokenizer are needed): {exc}"
        ) from exc
    foreign = set(getattr(described, "layer_types", None) or ()) - ATTENTION_LAYERS
    if foreign:
        raise PreflightError(f"layers of kind {', '.join(sorted(foreign))} are not supported")
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        vocabulary_size=int(described.vocab_size),
        context_size=int(described.max_position_embeddings),
        end_ids=_end_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id),
    )


def _build(described: Any, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_config(described, dtype=dtype)


def _read(config: EngineConfig, dtype: torch.dtype) -> Any:
    """Return the model with the weights of its files, all of them."""
    model, said = AutoModelForCausalLM.from_pretrained(
        config.model_dir,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if lacking := sorted({*said["missing_keys"], *said["unexpected_keys"]}):
        raise PreflightError(f"{lacking[0]} is in the files or in the model, not in both")
    return model


def load_draft(config: EngineConfig, main: LoadedModel) -> LoadedModel | None:
    """Build the draft model of ``config.draft_dir``, if there is to be one.

    Raises:
        PreflightError: no usable model there, or not one of the same tokens.
    """
    if config.draft_dir is None:
        return None
    draft = load_model(replace(config, model_dir=config.draft_dir, quantised={}))
    if draft.tokenizer.get_vocab() != main.tokenizer.get_vocab():
        raise PreflightError(
            f"the draft model of {config.draft_dir} has other tokens than {config.model_dir}"
        )
    if draft.context_size < main.context_size:
        raise PreflightError(
            f"the draft model of {config.draft_dir} has {draft.context_size} positions, it needs "
            f"the {main.context_size} of the model"
        )
    return draft


def _end_ids(*sources: int | list[int] | None) -> frozenset[int]:
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else () if source is None else (source,))
    return frozenset(ids)
