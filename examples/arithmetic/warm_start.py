"""The supervised phase: enough demonstrations that sampling sometimes finds the right answer.

Reinforcement learning can only reward what the policy already does now and then, so a fresh model
first imitates. The phase ends early on purpose: what is left to learn is left to the rewards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from task import EOS, MAX_NEW_TOKENS, Problem, build_config, problems
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(frozen=True)
class WarmStart:
    """How long and how fast to imitate."""

    # Share of right answers, taking the likeliest tokens, at which imitation ends.
    stop_exact: float = 0.85
    # Keeps the policy unsure of what it knows, so that samples differ and rewards can choose.
    label_smoothing: float = 0.4
    max_steps: int = 250
    batch_size: int = 128
    learning_rate: float = 3e-3
    ramp_steps: int = 20
    # Weight of the past in the running share; one batch alone is too noisy to stop on.
    memory: float = 0.8


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build the untrained model; weights depend on the seed alone."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(build_config(tokenizer))


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    options: WarmStart,
    seed: int,
    tell: Callable[[int, float], None],
) -> None:
    """Imitate until the likeliest answer is mostly right; tell step and share after each step.

    Stopping by skill and not by count starts the second phase alike whatever the seed.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=options.ramp_steps)
    running = 0.0
    for step, batch in enumerate(_batches(tokenizer, options, seed), start=1):
        loss, exact = _imitate(model, batch, options.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        running = options.memory * running + (1 - options.memory) * exact
        tell(step, running)
        if running > options.stop_exact:
            break


def _batches(tokenizer: PreTrainedTokenizerFast, options: WarmStart, seed: int) -> Iterator[Tensor]:
    drawn = problems(options.max_steps * options.batch_size, seed)
    for start in range(0, len(drawn), options.batch_size):
        yield _encode(tokenizer, drawn[start : start + options.batch_size])


def _encode(tokenizer: PreTrainedTokenizerFast, batch: list[Problem]) -> Tensor:
    return torch.tensor(
        tokenizer([problem.prompt + problem.answer + EOS for problem in batch])["input_ids"]
    )


def _imitate(model: Qwen3ForCausalLM, batch: Tensor, smoothing: float) -> tuple[Tensor, float]:
    # Only the answer is imitated: the digits of the question are random and cannot be learned.
    logits = model(input_ids=batch).logits[:, -MAX_NEW_TOKENS - 1 : -1]
    wanted = batch[:, -MAX_NEW_TOKENS:]
    loss = cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=smoothing)
    exact = (logits.argmax(dim=-1) == wanted).all(dim=1).float().mean()
    return loss, exact.item()
