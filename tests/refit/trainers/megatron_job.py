"""One process of a Megatron job: publishes a model, and proves it with the one of `transformers`.

Started by torchrun; rank 0 puts the parts together, which no trainer does, to have them judged.
"""

import warnings
from contextlib import nullcontext

warnings.simplefilter("ignore")  # of Megatron's about what is not installed on a CPU

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch import distributed  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from paceline.refit.trainers.megatron import MegatronTrainer  # noqa: E402
from paceline.system import system_clock  # noqa: E402

VOCABULARY, ADDED, HIDDEN, WIDE, HEADS, GROUPS, HEAD, LAYERS = 61, 64, 16, 24, 4, 2, 8, 2


def megatron_model() -> torch.nn.Module:
    """Return this process's part of a small model like Qwen3."""
    world = distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        tensor_model_parallel_size=world,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(11)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=ADDED,
        max_sequence_length=32,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )
    return model


def judged(state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return what `transformers` makes of the weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(state, strict=True)
    logits: torch.Tensor = model(ids).logits
    return logits


def main() -> None:
    """Publish, put together, compare."""
    # Megatron asks CUDA where its rotary table goes and for the state of a dropout that is off.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = nullcontext
    distributed.init_process_group("gloo")
    model = megatron_model()
    trainer = MegatronTrainer(clock=system_clock(), vocabulary=VOCABULARY)
    trainer.bind_tensors(model)
    part = trainer._collect(None)
    mine = {name: (part.read(name), part.regions.get(name)) for name in part.tensors}
    everybody: list[dict[str, tuple[torch.Tensor, object]]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(everybody, mine)
    ids = torch.arange(10).view(1, 10) * 5 % VOCABULARY
    with torch.no_grad():
        hidden = torch.ones(1, 1, 10, 10).triu(diagonal=1).bool()
        found = model(ids, torch.arange(10).view(1, 10), hidden)[..., :VOCABULARY]
        state: dict[str, torch.Tensor] = {}
        for each in everybody:
            for name, (tensor, region) in each.items():
                whole = tensor.shape if region is None else region.global_shape  # type: ignore[attr-defined]
                offsets = (0,) * tensor.dim() if region is None else region.offsets  # type: ignore[attr-defined]
                box = tuple(slice(a, a + n) for a, n in zip(offsets, tensor.shape, strict=True))
                state.setdefault(name, torch.full(whole, float("nan")))[box] = tensor
        wanted = judged(state, ids)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)
    print(f"logits agree, largest {float(wanted.abs().max()):.3f}", flush=True)  # noqa: T201
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
