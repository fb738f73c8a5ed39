"""A PEFT model is published as PEFT itself would merge it, or as a LoRA that engines can add."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from paceline.core.registry import load_entry
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.trainers.peft import PeftTrainer, Publishes
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import Follower, buffers_of

pytestmark = pytest.mark.filterwarnings(
    r"ignore:Model (with|has) `tie_word_embeddings", "ignore:`lora_bias=True` was passed"
)
FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA
HOST, PLACE = TrainerStagingMode.COPY_TO_HOST, TrainerStagingMode.IN_PLACE
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def dense(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(1)
    model: torch.nn.Module = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    return model.to(dtype)


def mixture() -> torch.nn.Module:
    torch.manual_seed(1)
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    model: torch.nn.Module = Qwen3MoeForCausalLM(config)
    return model


def with_lora(model: torch.nn.Module, **config: Any) -> Any:
    """Return a PeftModel whose LoRA is not zero any more."""
    found = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
    train(found)
    return found


def train(model: Any) -> None:
    """Change what a LoRA trains, as an optimizer does."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def trainer_of(model: Any, publishes: str = "merged", **more: Any) -> PeftTrainer:
    trainer = PeftTrainer(publishes=publishes, clock=FakeClock(), **more)
    trainer.bind_tensors(model)
    return trainer


def stage(trainer: TorchModuleTrainer, payload_format: WeightPayloadFormat = FULL) -> Any:
    staged = trainer.stage_shard(tensors=None, staging_mode=HOST, payload_format=payload_format)
    staged.publish_ready.wait()
    return staged


def merged(model: Any) -> Any:
    """Return the manifest of what PEFT's own merge leaves, staged as a plain module."""
    trainer = TorchModuleTrainer(clock=FakeClock(), wire_dtypes={"*": "BF16"})
    trainer.bind_tensors(copy.deepcopy(model).merge_and_unload())
    return parse_manifest(stage(trainer).manifest.data)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


CASES: dict[str, Callable[[], Any]] = {
    "every linear": lambda: with_lora(dense(tied=True), target_modules="all-linear"),
    "fp32 base": lambda: with_lora(dense(dtype=torch.float32), target_modules=["q_proj"]),
    "ranks of their own": lambda: with_lora(
        dense(), target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 2}, use_rslora=True
    ),
    "embedding tied to the head": lambda: with_lora(
        dense(tied=True), target_modules=["v_proj", "embed_tokens"]
    ),
    "head trained whole": lambda: with_lora(
        dense(), target_modules=["k_proj"], modules_to_save=["lm_head"]
    ),
    "DoRA": lambda: with_lora(dense(), target_modules=["o_proj", "down_proj"], use_dora=True),
    "fused experts": lambda: with_lora(
        mixture(),
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "some tokens": lambda: with_lora(
        dense(), target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 4]}
    ),
    "merged already": lambda: _merge_live(with_lora(dense(), target_modules=["q_proj"])),
}


def _merge_live(model: Any) -> Any:
    model.merge_adapter()
    return model


@pytest.mark.parametrize("case", CASES)
def test_merged_is_what_peft_merges_and_the_model_stays(case: str) -> None:
    """Names, ties, shapes and every bit are those of merge_and_unload; nothing live changes."""
    model = CASES[case]()
    before = bits(model)
    trainer = trainer_of(model, wire_dtypes={"*": "BF16"})
    found = parse_manifest(stage(trainer).manifest.data)
    assert bits(model) == before
    if case == "merged already":
        model.unmerge_adapter()  # does not bring the old bits back, so the proof is the other way
        model.merge_adapter()
        with pytest.warns(UserWarning, match="already merged"):
            wanted = merged(model)
        found = parse_manifest(stage(trainer).manifest.data)
    else:
        wanted = merged(model)
    assert found.lora is None
    assert (found.root_digest, found.aliases) == (wanted.root_digest, wanted.aliases)


def test_merged_deltas_hold_what_moved() -> None:
    """A step of the LoRA moves the matrices that it is on, and no other tensor travels."""
    model = with_lora(dense(), target_modules=["q_proj"])
    trainer, follower = trainer_of(model), Follower()
    first = stage(trainer)
    trainer.commit_staged(first)
    follower.install(first)
    train(model)
    manifest = follower.install(stage(trainer, DELTA))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {segment.tensor for segment in manifest.segments} == {name}
    want = copy.deepcopy(model).merge_and_unload().state_dict()[name]
    assert follower.live_bytes()[name] == want.view(-1).view(torch.uint8).numpy().tobytes()


def test_hooks_are_left_out_of_the_copy() -> None:
    """A hook that holds on to something that cannot be copied does not keep a module from it."""
    model = with_lora(dense(), target_modules=["q_proj"])

    class Uncopied:
        def __call__(self, *_: object) -> None:
            """Do nothing."""

        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError

    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.register_forward_hook(Uncopied())
    layer.base_layer.register_full_backward_hook(Uncopied())
    stage(trainer_of(model))
    assert len(layer._forward_hooks) == 1


@pytest.mark.parametrize("rslora", [False, True])
def test_alone_is_a_lora_that_an_engine_can_add(rslora: bool) -> None:
    """Base weights and what travels give, by the description alone, what PEFT merges."""
    base = dense(tied=True, dtype=torch.float32)
    untouched = copy.deepcopy(base)
    model = with_lora(
        base,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        rank_pattern={"down_proj": 2},
        use_rslora=rslora,
    )
    trainer, follower = trainer_of(model, "alone"), Follower()
    first = stage(trainer)
    trainer.commit_staged(first)
    follower.install(first)
    train(model)
    manifest = follower.install(stage(trainer, DELTA))
    assert manifest.lora is not None
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert {entry.name for entry in manifest.tensors} == set(state)
    assert manifest.lora.model_root == root_of(untouched)
    added = untouched.state_dict()
    live = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(state[name].shape)
        for name, data in follower.live_bytes().items()
    }
    for module in manifest.lora.modules:
        prefix = f"base_model.model.{module.name}"
        scale = module.scale(is_rank_stabilised=manifest.lora.is_rank_stabilised)
        assert scale == 8 / (math.sqrt(module.rank) if rslora else module.rank)
        if f"{prefix}.lora_A.weight" in live:
            found = live[f"{prefix}.lora_B.weight"] @ live[f"{prefix}.lora_A.weight"]
        else:
            found = (live[f"{prefix}.lora_embedding_B"] @ live[f"{prefix}.lora_embedding_A"]).T
        added[f"{module.name}.weight"] += found * scale
    wanted = copy.deepcopy(model).merge_and_unload().state_dict()
    assert added.keys() == wanted.keys()
    assert all(torch.equal(added[name], wanted[name]) for name in wanted)


def root_of(model: torch.nn.Module, **more: Any) -> str:
    trainer = TorchModuleTrainer(clock=FakeClock(), **more)
    trainer.bind_tensors(model)
    return parse_manifest(stage(trainer).manifest.data).root_digest


def test_the_weights_below_are_named_in_the_engines_dtype() -> None:
    """Under fp32 masters the root is that of the bf16 weights that engines hold."""
    base = dense(dtype=torch.float32)
    wanted = root_of(copy.deepcopy(base), wire_dtypes={"*": "BF16"})
    model = with_lora(base, target_modules=["q_proj"])
    dtypes = {"*.lora_?.weight": "F32", "*": "BF16"}
    trainer = trainer_of(model, "alone", wire_dtypes=dtypes)
    manifest = parse_manifest(stage(trainer).manifest.data)
    assert manifest.lora is not None
    assert manifest.lora.model_root == wanted
    assert {entry.dtype for entry in manifest.tensors} == {"F32"}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"modules_to_save": ["lm_head"]}, "no LoRA"),
        ({"use_dora": True}, "no plain product"),
        ({"lora_bias": True}, "no plain product"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "no LoRA"),
    ],
)
def test_what_engines_would_leave_out_is_refused(config: Any, what: str) -> None:
    """A LoRA alone is plain or it is not published alone."""
    model = get_peft_model(dense(), LoraConfig(r=4, target_modules=["q_proj"], **config))
    with pytest.raises(ValueError, match=rf"{what}.*publish it merged"):
        trainer_of(model, "alone")


def test_experts_alone_are_refused() -> None:
    """A LoRA of parameters in one tensor has no module that an engine could add it to."""
    model = with_lora(mixture(), target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="publish it merged"):
        trainer_of(model, "alone")


def test_a_scale_that_was_set_by_hand_is_refused() -> None:
    """Rank and alpha must say the scale."""
    model = with_lora(dense(), target_modules=["q_proj"])
    model.get_base_model().model.layers[0].self_attn.q_proj.set_scale("default", 3)
    with pytest.raises(ValueError, match="publish it merged"):
        trainer_of(model, "alone")


def test_two_active_loras_merge_and_do_not_travel_alone() -> None:
    """Merging takes all that are active; a version alone is one."""
    model = with_lora(dense(), target_modules=["q_proj"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    train(model)
    found = parse_manifest(stage(trainer_of(model, wire_dtypes={"*": "BF16"})).manifest.data)
    assert found.root_digest == merged(model).root_digest
    with pytest.raises(ValueError, match="2 LoRAs are active"):
        trainer_of(model, "alone")


def test_two_loras_on_one_tied_weight_are_refused() -> None:
    """Which of them would come first is nobody's choice."""
    model = with_lora(dense(tied=True), target_modules=["embed_tokens", "lm_head"])
    with pytest.raises(ValueError, match="both have a LoRA"):
        trainer_of(model)


def test_modes_formats_and_names() -> None:
    """Merged weights lie nowhere; a LoRA is no checkpoint; a plain module is sent elsewhere."""
    assert load_entry(TRAINER_ENGINES, "peft", port="trainer engine") is PeftTrainer
    model = with_lora(dense(), target_modules=["q_proj"])
    whole, alone = trainer_of(model), trainer_of(model, Publishes.ALONE)
    assert PLACE not in whole.supported_staging_modes
    assert PLACE in alone.supported_staging_modes
    assert WeightPayloadFormat.FULL_HF_CHECKPOINT in whole.supported_payload_formats
    assert WeightPayloadFormat.FULL_HF_CHECKPOINT not in alone.supported_payload_formats
    staged = alone.stage_shard(tensors=None, staging_mode=PLACE, payload_format=FULL)
    staged.publish_ready.wait()
    assert buffers_of(staged).manifest.lora is not None
    with pytest.raises(ValueError, match="no PeftModel"):
        trainer_of(dense())
    with pytest.raises(ValueError, match="elsewhere"):
        PeftTrainer(publishes="elsewhere", clock=FakeClock())
