"""Teach a tiny model to add: a short supervised warm start, then GRPO with TRL.

Rollouts come from the engines of the run, new weights go to them after every optimizer step.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from task import MAX_NEW_TOKENS, build_tokenizer, problems, rewards
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3ForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from warm_start import WarmStart, build_model, warm_start

from paceline.refit import Sampling, TrainerConnection, join_run
from paceline.refit.integrations.transformers import PublishCallback, ReportCallback
from paceline.refit.integrations.trl import Rollouts

TELL_EVERY = 20
CHECKPOINTS = "checkpoints"
"""In the working directory; a job that names it under `artifacts.pull` survives its machine."""


@dataclass(frozen=True)
class Options:
    """What the command line decides; README.md gives the reasons for the defaults."""

    seed: int = 0
    warm_steps: int = 250
    steps: int = 28
    prompts: int = 32
    generations: int = 16
    learning_rate: float = 2.5e-4
    ramp_steps: int = 5
    adam_epsilon: float = 1e-3
    temperature: float = 1.0
    publish_every: int = 1
    save_every: int = 0
    # Two threads on two shared cores wait for each other and can be slower than one.
    threads: int = 1


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Turn flags into options; every option is a flag of the same name."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in vars(Options()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    return Options(**vars(parser.parse_args(arguments)))


def score(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return the reward as TRL calls it: columns by name, text without special tokens."""
    return rewards(prompts, completions)


def last_checkpoint(run: TrainerConnection) -> str | None:
    """Return where to go on from: what an earlier start of this role left, on whatever machine."""
    saved = None if run.resume_from is None else run.resume_from / CHECKPOINTS
    return get_last_checkpoint(str(saved)) if saved is not None and saved.is_dir() else None


def warm_model(
    run: TrainerConnection, tokenizer: PreTrainedTokenizerFast, options: Options
) -> Qwen3ForCausalLM:
    """Build the model and run the supervised phase, unless a checkpoint has it behind it."""
    model = build_model(tokenizer, options.seed)
    if last_checkpoint(run) is not None:
        return model
    how = WarmStart(max_steps=options.warm_steps)

    def tell(step: int, share: float) -> None:
        if step == 1 or step % TELL_EVERY == 0:
            note = f"{share:.0%} right, until {how.stop_exact:.0%}"
            fields = {"phase": "warm start", "done": step, "total": how.max_steps, "note": note}
            run.notify("role.progress", fields)

    warm_start(model, tokenizer, how, options.seed + 1, tell)
    return model


def grpo_config(options: Options, directory: Path) -> GRPOConfig:
    """Return the settings of the second phase."""
    return GRPOConfig(
        output_dir=str(directory),
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.generations,
        num_generations=options.generations,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=options.temperature,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="steps" if options.save_every else "no",
        save_steps=max(1, options.save_every),
        save_total_limit=6,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def adam(model: Qwen3ForCausalLM, options: Options) -> tuple[AdamW, LambdaLR]:
    """Build Adam with a large epsilon and a ramp: both keep the change of a step sparse in bf16.

    TRL's own ramp begins at a rate of zero, which would publish a version without a change.
    """
    optimizer = AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(0.9, 0.99),
        eps=options.adam_epsilon,
        weight_decay=0.0,
    )
    ramp = options.ramp_steps
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / ramp))


def main() -> None:
    """Run both phases as the trainer of a Paceline run."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    # Read when the trainer is built: `rollout_func` is experimental in TRL, and we know.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # noqa: TID251
    tokenizer = build_tokenizer()
    asked = problems(options.steps * options.prompts, options.seed + 2)
    sampling = Sampling(
        max_tokens=MAX_NEW_TOKENS, temperature=options.temperature, seed=options.seed
    )
    with join_run() as run, TemporaryDirectory() as directory, ExitStack() as closing:
        model = warm_model(run, tokenizer, options)
        publisher = closing.enter_context(run.publisher(model, wire_dtypes={"*": "BF16"}))
        rollouts = Rollouts(run.rollouts(), sampling=sampling)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=grpo_config(options, Path(CHECKPOINTS if options.save_every else directory)),
            train_dataset=Dataset.from_dict({"prompt": [problem.prompt for problem in asked]}),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[
                PublishCallback(publisher, every=options.publish_every),
                ReportCallback(run.notify, staleness=rollouts.staleness),
            ],
            optimizers=adam(model, options),
        )
        trainer.remove_callback(PrinterCallback)  # the run shows the steps
        trainer.train(resume_from_checkpoint=last_checkpoint(run))
        publisher.wait_installed(timeout_s=60)
        model.save_pretrained(run.out / "checkpoint-final")
        tokenizer.save_pretrained(run.out / "checkpoint-final")


if __name__ == "__main__":
    main()
