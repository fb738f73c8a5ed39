"""Rollouts for TRL's GRPOTrainer from engines that run elsewhere.

TRL (seen with 1.16) hands a ``rollout_func`` every prompt ``num_generations`` times in a row and
wants one completion for each entry. Without its own vLLM mode it trains with an importance ratio
of one; the log-probabilities of the engines feed its off-policy mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from paceline.refit.generators.protocol import Sampling
from paceline.refit.rollouts import Completion

STEP_STRIDE = 1_000_003
"""Seeds of two runs with neighbouring seeds do not meet before so many steps."""


class Completes(Protocol):
    """The part of the rollout client that is needed here."""

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``sampling.n`` completions for each prompt, in order."""
        ...


class Rollouts:
    """A ``rollout_func`` for TRL: pass the object itself."""

    def __init__(self, client: Completes, *, sampling: Sampling) -> None:
        """Take the client and how to sample; with a seed, each step has one of its own."""
        self._client = client
        self._sampling = sampling
        self._staleness = 0.0

    def staleness(self) -> float:
        """Return the mean staleness of the last rollouts, in versions."""
        return self._staleness

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return token ids, log-probabilities and the staleness of each completion.

        Raises:
            ValueError: TRL repeated the prompts in a way that we do not know.
            RefitError, DeadlineExceededError: what the client raises.
        """
        group = _group_size(prompts, trainer.num_generations)
        unique = [_encode(prompt, trainer.processing_class) for prompt in prompts[::group]]
        choices = self._client.complete(unique, self._for_step(trainer.state.global_step, group))
        drawn = [completion for each in choices for completion in each]
        self._staleness = sum(each.staleness for each in drawn) / len(drawn)
        return {
            "prompt_ids": [list(each.prompt_token_ids) for each in drawn],
            "completion_ids": [list(each.token_ids) for each in drawn],
            "logprobs": [list(each.logprobs) for each in drawn],
            "staleness": [each.staleness for each in drawn],
        }

    def _for_step(self, step: int, group: int) -> Sampling:
        seed = self._sampling.seed
        if seed is not None:
            seed = (seed * STEP_STRIDE + step) % 2**63
        return replace(self._sampling, n=group, seed=seed)


def _group_size(prompts: Sequence[Any], num_generations: int) -> int:
    """Return how often each prompt stands in a row: as promised, or once (evaluation)."""
    groups = [prompts[at : at + num_generations] for at in range(0, len(prompts), num_generations)]
    if not prompts:
        raise ValueError("TRL asked for rollouts of no prompt")
    is_grouped = all(
        len(each) == num_generations and all(prompt == each[0] for prompt in each)
        for each in groups
    )
    return num_generations if is_grouped else 1


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of a text, or of a conversation through the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True))
