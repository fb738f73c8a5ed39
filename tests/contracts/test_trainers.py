"""The trainer engines that there are keep the trainer contract."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from paceline.refit.trainers.peft import PeftTrainer
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.trainer import TrainerContract, Training


class TestTorchModule(TrainerContract):
    """A module with a tie, in bf16, published as it is."""

    wire_dtypes: Mapping[str, str] | None = None
    dtype = torch.bfloat16

    def make(self) -> Training:
        torch.manual_seed(1)
        embed = torch.nn.Embedding(30, 8, dtype=self.dtype)
        head = torch.nn.Linear(8, 30, bias=False, dtype=self.dtype)
        norm = torch.nn.LayerNorm(8, dtype=self.dtype)
        head.weight = embed.weight
        module = torch.nn.ModuleDict({"embed": embed, "head": head, "norm": norm})
        trainer = TorchModuleTrainer(clock=FakeClock(), wire_dtypes=self.wire_dtypes)
        trainer.bind_tensors(module)

        def step() -> None:
            with torch.no_grad():
                embed.weight.view(-1)[::7].add_(0.5)
                norm.bias.add_(1)

        def wire_bytes() -> dict[str, bytes]:
            state = module.state_dict()
            del state["head.weight"]  # the alias
            return {
                name: tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
                for name, tensor in state.items()
            }

        return Training(trainer=trainer, step=step, wire_bytes=wire_bytes)


class TestPeftMerged(TrainerContract):
    """A LoRA over fp32 weights, merged, in bf16."""

    publishes = "merged"
    dtypes: Mapping[str, str] = {"*": "BF16"}

    def make(self) -> Training:
        torch.manual_seed(1)
        base = torch.nn.Sequential(
            OrderedDict(up=torch.nn.Linear(6, 40), down=torch.nn.Linear(40, 6, bias=False))
        )
        model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["up"]))
        lora = model.get_base_model().up
        trainer = PeftTrainer(publishes=self.publishes, clock=FakeClock(), wire_dtypes=self.dtypes)
        trainer.bind_tensors(model)

        def step() -> None:
            with torch.no_grad():
                lora.lora_B["default"].weight.view(-1)[::7].add_(0.5)

        return Training(trainer=trainer, step=step, wire_bytes=lambda: self.wire_bytes(model))

    def wire_bytes(self, model: Any) -> dict[str, bytes]:
        """Return what PEFT itself merges."""
        state = copy.deepcopy(model).merge_and_unload().state_dict()
        return {
            name: tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
            for name, tensor in state.items()
        }


class TestPeftAlone(TestPeftMerged):
    """The LoRA and nothing else, as it is."""

    publishes = "alone"
    dtypes: Mapping[str, str] = {}

    def wire_bytes(self, model: Any) -> dict[str, bytes]:
        """Return what PEFT itself would save."""
        return {
            name: tensor.view(torch.uint8).numpy().tobytes()
            for name, tensor in get_peft_model_state_dict(model).items()
        }


class TestTorchModuleThatRounds(TestTorchModule):
    """Masters in fp32, bf16 on the wire."""

    wire_dtypes = {"*": "BF16"}  # noqa: RUF012 - read only
    dtype = torch.float32
