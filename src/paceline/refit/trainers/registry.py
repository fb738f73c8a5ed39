"""Trainer engines by name."""

from paceline.core.registry import LazyEntry

TRAINER_ENGINES: dict[str, LazyEntry] = {
    "torch": LazyEntry("paceline.refit.trainers.torch_module", "TorchModuleTrainer", "train"),
    "peft": LazyEntry("paceline.refit.trainers.peft", "PeftTrainer", "peft"),
    "megatron": LazyEntry("paceline.refit.trainers.megatron", "MegatronTrainer", "train"),
    "sharded": LazyEntry("paceline.refit.trainers.sharded", "ShardedTrainer", "train"),
}
"""Name -> class that signs TrainerEngineAdapter."""
