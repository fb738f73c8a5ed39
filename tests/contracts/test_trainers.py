"""The trainer engines that there are keep the trainer contract."""

from collections.abc import Mapping

import torch

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


class TestTorchModuleThatRounds(TestTorchModule):
    """Masters in fp32, bf16 on the wire."""

    wire_dtypes = {"*": "BF16"}  # noqa: RUF012 - read only
    dtype = torch.float32
