"""The engine's model once more, as shapes only: its loader can be watched without any memory."""

from copy import copy
from typing import Any

import torch
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


def build_skeleton(vllm_config: Any, model_config: Any) -> Any:
    """Return a model like the worker's on the meta device: same shards, same fused parameters.

    Must be called in the worker, whose parallel state decides the shards. Weights that the engine
    quantises while loading appear as the checkpoint has them.
    """
    config = copy(vllm_config)
    config.model_config = model_config
    # Attention layers enter themselves there by name, and the real ones are in already.
    config.compilation_config = copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    if quantises_while_loading(vllm_config, model_config):
        config.quant_config = None
    dtype = model_config.dtype
    with torch.device("meta"), torch.no_grad(), set_default_torch_dtype(dtype):
        return initialize_model(config, model_config=model_config)


def quantises_while_loading(vllm_config: Any, model_config: Any) -> bool:
    """Say whether the checkpoint is unquantised and the engine makes its own format of it."""
    if vllm_config.quant_config is None:
        return False
    return getattr(model_config.hf_config, "quantization_config", None) is None
