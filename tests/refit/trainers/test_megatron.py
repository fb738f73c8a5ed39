"""Megatron's layout, from the attributes of its parameters: every element once, under its name.

The other direction, from a checkpoint to what each process holds, is written here from Megatron's
own description of its layout; tests against the library itself are marked slow.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.registry import load_entry
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.trainers.megatron import Grid, MegatronTrainer
from paceline.refit.trainers.protocol import Collected, SupportsSlots
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.testing.clock import FakeClock

HIDDEN, WIDE, HEAD, VOCABULARY = 6, 8, 3, 11


class Model:
    """What is looked at of one of Megatron's models."""

    def __init__(self, config: Any, layers: list[int], tensors: dict[str, torch.Tensor]) -> None:
        self.config, self._layers, self._tensors = config, layers, tensors

    def state_dict(self, *, keep_vars: bool) -> dict[str, Any]:
        assert keep_vars, "only parameters carry their attributes"
        return {**self._tensors, "decoder._extra_state": None}

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for index, number in enumerate(self._layers):
            yield f"decoder.layers.{index}", SimpleNamespace(layer_number=number + 1)


class Job:
    """A checkpoint, and how a job of some sizes holds it."""

    def __init__(
        self, *, layers: int = 2, heads: int = 8, groups: int = 4, experts: int = 0
    ) -> None:
        self.layers, self.heads, self.groups, self.experts = layers, heads, groups, experts
        generator = torch.Generator().manual_seed(5)
        sizes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
            "lm_head.weight": (VOCABULARY, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            sizes |= {
                f"{prefix}.input_layernorm.weight": (HIDDEN,),
                f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
                f"{prefix}.self_attn.q_proj.weight": (heads * HEAD, HIDDEN),
                f"{prefix}.self_attn.k_proj.weight": (groups * HEAD, HIDDEN),
                f"{prefix}.self_attn.v_proj.weight": (groups * HEAD, HIDDEN),
                f"{prefix}.self_attn.q_proj.bias": (heads * HEAD,),
                f"{prefix}.self_attn.k_proj.bias": (groups * HEAD,),
                f"{prefix}.self_attn.v_proj.bias": (groups * HEAD,),
                f"{prefix}.self_attn.o_proj.weight": (HIDDEN, heads * HEAD),
            }
            mlps = [f".experts.{each}" for each in range(experts)] or [""]
            if experts:
                sizes[f"{prefix}.mlp.gate.weight"] = (experts, HIDDEN)
            for mlp in mlps:
                sizes |= {
                    f"{prefix}.mlp{mlp}.gate_proj.weight": (WIDE, HIDDEN),
                    f"{prefix}.mlp{mlp}.up_proj.weight": (WIDE, HIDDEN),
                    f"{prefix}.mlp{mlp}.down_proj.weight": (HIDDEN, WIDE),
                }
        self.full = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}

    def held(self, grid: Grid) -> Model:
        """Return the model of one process."""
        count = self.layers // grid.pp[1]
        numbers = list(range(grid.pp[0] * count, (grid.pp[0] + 1) * count))
        tensors: dict[str, torch.Tensor] = {}
        if grid.pp[0] == 0:
            tensors["embedding.word_embeddings.weight"] = self._rows("model.embed_tokens", grid)
        if grid.pp[0] == grid.pp[1] - 1:
            tensors["output_layer.weight"] = self._rows("lm_head", grid)
            tensors["decoder.final_layernorm.weight"] = self.full["model.norm.weight"].clone()
        for index, number in enumerate(numbers):
            tensors |= self._layer(f"decoder.layers.{index}", f"model.layers.{number}", grid)
        config = SimpleNamespace(
            num_attention_heads=self.heads, num_query_groups=self.groups, kv_channels=HEAD
        )
        return Model(config, numbers, tensors)

    def _layer(self, here: str, there: str, grid: Grid) -> dict[str, torch.Tensor]:
        full = self.full
        found = {
            f"{here}.input_layernorm.weight": full[f"{there}.input_layernorm.weight"].clone(),
            f"{here}.mlp.linear_fc1.layer_norm_weight": full[
                f"{there}.post_attention_layernorm.weight"
            ].clone(),
            f"{here}.self_attention.linear_qkv.weight": self._qkv(
                f"{there}.self_attn", "weight", grid
            ),
            f"{here}.self_attention.linear_qkv.bias": self._qkv(f"{there}.self_attn", "bias", grid),
            f"{here}.self_attention.linear_proj.weight": cut(
                full[f"{there}.self_attn.o_proj.weight"], 1, grid
            ),
        }
        if not self.experts:
            return found | self._mlp(f"{here}.mlp.{{}}.weight", f"{there}.mlp", grid)
        found[f"{here}.mlp.router.weight"] = full[f"{there}.mlp.gate.weight"].clone()
        each = self.experts // grid.ep[1]
        for local in range(each):
            expert = grid.ep[0] * each + local
            # both ways of Megatron's to hold experts
            pattern = f"{here}.mlp.experts.{{}}.weight{local}"
            if here.endswith("0"):
                pattern = f"{here}.mlp.experts.local_experts.{local}.{{}}.weight"
            found |= self._mlp(pattern, f"{there}.mlp.experts.{expert}", grid)
        return found

    def _mlp(self, pattern: str, there: str, grid: Grid) -> dict[str, torch.Tensor]:
        gate, up = (cut(self.full[f"{there}.{n}_proj.weight"], 0, grid) for n in ("gate", "up"))
        return {
            pattern.format("linear_fc1"): marked(torch.cat([gate, up]), 0),
            pattern.format("linear_fc2"): cut(self.full[f"{there}.down_proj.weight"], 1, grid),
        }

    def _qkv(self, there: str, kind: str, grid: Grid) -> torch.Tensor:
        """Group by group: its queries, its key, its value; then this process's groups."""
        q, k, v = (self.full[f"{there}.{n}_proj.{kind}"] for n in "qkv")
        per = self.heads // self.groups * HEAD
        rows = []
        for group in range(self.groups):
            rows += [q[group * per : (group + 1) * per]]
            rows += [each[group * HEAD : (group + 1) * HEAD] for each in (k, v)]
        return cut(torch.cat(rows), 0, grid)

    def _rows(self, there: str, grid: Grid) -> torch.Tensor:
        """Rows of the vocabulary, after as many were added that all have equally many."""
        rows = self.full[f"{there}.weight"]
        missing = -len(rows) % (4 * grid.tp[1])
        return cut(torch.cat([rows, torch.full((missing, HIDDEN), 7.0)]), 0, grid)


def marked(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Put on a tensor what Megatron puts on a parallel parameter."""
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    return tensor


def cut(tensor: torch.Tensor, dim: int, grid: Grid) -> torch.Tensor:
    return marked(tensor.chunk(grid.tp[1], dim)[grid.tp[0]].clone(), dim)


def grids(*, tp: int, pp: int, ep: int, dp: int) -> Iterator[Grid]:
    for at in itertools.product(range(tp), range(pp), range(ep), range(dp)):
        yield Grid(tp=(at[0], tp), pp=(at[1], pp), ep=(at[2], ep), dp=(at[3], dp))


def trainer_of(model: Any, grid: Grid, **more: Any) -> MegatronTrainer:
    trainer = MegatronTrainer(clock=FakeClock(), grid=grid, vocabulary=VOCABULARY, **more)
    trainer.bind_tensors(model)
    return trainer


def put_together(parts: list[Collected], full: dict[str, torch.Tensor]) -> None:
    """Prove that the parts are the checkpoint, each element once."""
    found = {name: torch.full_like(each, float("nan")) for name, each in full.items()}
    for part in parts:
        for name in part.tensors:
            read, region = part.read(name), part.regions.get(name)
            assert read.shape == part.tensors[name].shape
            offsets = (0,) * read.dim() if region is None else region.offsets
            if region is not None:
                assert region.global_shape == full[name].shape
            box = tuple(slice(a, a + n) for a, n in zip(offsets, read.shape, strict=True))
            assert bool(found[name][box].isnan().all()), f"{name} comes twice"
            found[name][box] = read
    for name, each in full.items():
        assert torch.equal(found[name], each), name


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    groups=st.sampled_from([4, 8]),
)
@settings(max_examples=12)
def test_any_job_publishes_the_checkpoint(tp: int, pp: int, ep: int, dp: int, groups: int) -> None:
    """Whatever the sizes: every element of every tensor, under its name, from one process."""
    job = Job(groups=groups, experts=4 if ep > 1 else 0)
    parts, slots = [], set()
    for grid in grids(tp=tp, pp=pp, ep=ep, dp=dp):
        trainer = trainer_of(job.held(grid), grid)
        slots.add(trainer.source_slot_id)
        parts.append(trainer._collect(None))
    put_together(parts, job.full)
    assert slots == set(trainer.expected_source_slots)
    assert len(slots) == tp * pp * ep * dp


def test_a_shard_says_where_its_parts_lie() -> None:
    """The manifest of one of two processes: halves where Megatron cuts, wholes where it copies."""
    assert load_entry(TRAINER_ENGINES, "megatron", port="trainer engine") is MegatronTrainer
    job, grid = Job(), Grid(tp=(1, 2))
    trainer = trainer_of(job.held(grid), grid)
    assert isinstance(trainer, SupportsSlots)
    staged = trainer.stage_shard(
        tensors=None,
        staging_mode=TrainerStagingMode.COPY_TO_HOST,
        payload_format=WeightPayloadFormat.FULL_TENSOR,
    )
    entries = {entry.name: entry for entry in parse_manifest(staged.manifest.data).tensors}
    query = entries["model.layers.1.self_attn.q_proj.weight"]
    assert query.region is not None
    assert query.shape == (job.heads * HEAD // 2, HIDDEN)
    assert query.region.offsets == (job.heads * HEAD // 2, 0)
    output = entries["model.layers.0.self_attn.o_proj.weight"]
    assert output.region is not None
    assert output.region.offsets == (0, job.heads * HEAD // 2)
    embedding = entries["model.embed_tokens.weight"]
    assert embedding.shape == (VOCABULARY - 8, HIDDEN), "rows that were added do not travel"
    assert trainer.source_slot_id == "publisher:pp0-of-1:dp0-of-1:ep0-of-1:tp1-of-2"


def test_a_tied_head_is_another_name_of_the_embedding() -> None:
    """With the output layer's rows shared, they travel once."""
    job = Job()
    model: Any = job.held(Grid())
    model.share_embeddings_and_output_weights = True
    model._tensors["output_layer.weight"] = model._tensors["embedding.word_embeddings.weight"]
    found = trainer_of(model, Grid())._collect(None)
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in found.tensors
    with pytest.raises(ValueError, match="untie"):
        trainer_of(model, Grid(pp=(0, 2)))


def test_what_is_not_known_is_refused() -> None:
    """A name without a rule, heads that are copied between processes: said, never left out."""
    model = Job().held(Grid())
    model._tensors["decoder.layers.0.self_attention.linear_q_down_proj.weight"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"linear_q_down_proj.*add one to `names`"):
        trainer_of(model, Grid())
    few = Job(groups=2)
    with pytest.raises(ValueError, match="2 groups of heads over 4"):
        trainer_of(few.held(Grid(tp=(0, 2))), Grid(tp=(0, 4)))
    with pytest.raises(ValueError, match="bind_tensors"):
        _ = MegatronTrainer(clock=FakeClock(), vocabulary=1).expected_source_slots
