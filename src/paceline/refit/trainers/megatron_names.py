"""What Megatron-Core's tensors are called in Hugging Face's files, as declared rules. Pure.

A tensor there may be several here: a fused projection is cut into its parts. Another family of
models is another tuple of rules.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Fused(StrEnum):
    """How one of Megatron's tensors holds those of the files."""

    NO = "no"
    GATE_UP = "gate_up"
    """Each process has its rows of the gate, and then its rows of up."""
    QKV = "qkv"
    """By groups of heads: the queries of a group, its key, its value."""
    VOCABULARY = "vocabulary"
    """Rows are added at the end until every process has equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of tensor."""

    pattern: str
    """Regular expression for the whole name. A group ``layer`` or ``expert`` is a number among
    those of this process, and becomes the number among all."""
    names: tuple[str, ...]
    """In the files, one per part; ``{layer}``, ``{expert}`` and other groups are put in."""
    fused: Fused = Fused.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a rule says of one tensor."""

    names: tuple[str, ...]
    fused: Fused
    is_expert: bool


EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_LAYER: Final = r"decoder\.layers\.(?P<layer>\d+)\."
_HF: Final = "model.layers.{layer}."
_EXPERT: Final = _HF + "mlp.experts.{expert}."

DECODER: Final = (
    Rule(
        pattern=r"embedding\.word_embeddings\.weight",
        names=(EMBEDDING,),
        fused=Fused.VOCABULARY,
    ),
    Rule(pattern=r"output_layer\.weight", names=(HEAD,), fused=Fused.VOCABULARY),
    Rule(pattern=r"decoder\.final_layernorm\.weight", names=("model.norm.weight",)),
    Rule(
        pattern=_LAYER + r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
        names=(_HF + "input_layernorm.weight",),
    ),
    Rule(
        pattern=_LAYER + r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
        names=(_HF + "post_attention_layernorm.weight",),
    ),
    Rule(
        pattern=_LAYER + r"self_attention\.linear_qkv\.(?P<kind>weight|bias)",
        names=tuple(_HF + f"self_attn.{each}_proj.{{kind}}" for each in "qkv"),
        fused=Fused.QKV,
    ),
    Rule(
        pattern=_LAYER + r"self_attention\.(?P<which>[qk])_layernorm\.weight",
        names=(_HF + "self_attn.{which}_norm.weight",),
    ),
    Rule(
        pattern=_LAYER + r"self_attention\.linear_proj\.weight",
        names=(_HF + "self_attn.o_proj.weight",),
    ),
    Rule(
        pattern=_LAYER + r"mlp\.linear_fc1\.weight",
        names=(_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        fused=Fused.GATE_UP,
    ),
    Rule(pattern=_LAYER + r"mlp\.linear_fc2\.weight", names=(_HF + "mlp.down_proj.weight",)),
    Rule(pattern=_LAYER + r"mlp\.router\.weight", names=(_HF + "mlp.gate.weight",)),
    *(
        rule
        for tail in (r"local_experts\.(?P<expert>\d+)\.{}\.weight", r"{}\.weight(?P<expert>\d+)")
        for rule in (
            Rule(
                pattern=_LAYER + r"mlp\.experts\." + tail.format("linear_fc1"),
                names=(_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
                fused=Fused.GATE_UP,
            ),
            Rule(
                pattern=_LAYER + r"mlp\.experts\." + tail.format("linear_fc2"),
                names=(_EXPERT + "down_proj.weight",),
            ),
        )
    ),
)
"""Llama, Qwen, Mistral and mixtures of experts that are built like them."""


def named(
    name: str, rules: Sequence[Rule], *, layers: Sequence[int], first_expert: int = 0
) -> Named:
    """Return what a tensor of this process is called.

    Args:
        name: Megatron's.
        rules: the first that matches counts.
        layers: the number among all of each layer that is here.
        first_expert: the number among all of the first expert that is here.

    Raises:
        ValueError: no rule names it, or it is of a layer that is not here.
    """
    for rule in rules:
        match = re.fullmatch(rule.pattern, name)
        if match is None:
            continue
        groups: dict[str, str | int] = dict(match.groupdict())
        if "layer" in groups:
            groups["layer"] = layers[int(groups["layer"])]
        is_expert = "expert" in groups
        if is_expert:
            groups["expert"] = first_expert + int(groups["expert"])
        names = tuple(each.format(**groups) for each in rule.names)
        return Named(names=names, fused=rule.fused, is_expert=is_expert)
    raise ValueError(f"no rule says what {name!r} is called in a checkpoint: add one to `names`")


def count_experts(names: Iterable[str], rules: Sequence[Rule]) -> int:
    """Return how many experts of a layer are among the tensors of this process."""
    return len(
        {
            match["expert"]
            for name in names
            for rule in rules
            if "(?P<expert>" in rule.pattern and (match := re.fullmatch(rule.pattern, name))
        }
    )
