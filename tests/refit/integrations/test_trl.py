"""Rollouts hand TRL one completion per entry, in its order."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from paceline.refit.generators.protocol import InstalledVersion, Sampling, VersionSpan
from paceline.refit.integrations.trl import Rollouts
from paceline.refit.rollouts import Completion


class EchoClient:
    """Answers each prompt with its own ids reversed; choice k is k versions behind."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        self.asked.append(([list(prompt) for prompt in prompts], sampling))
        return [[self._choice(tuple(prompt), k) for k in range(sampling.n)] for prompt in prompts]

    def _choice(self, prompt: tuple[int, ...], staleness: int) -> Completion:
        installed = InstalledVersion(version_id="v", sequence=1, root_digest="r")
        return Completion(
            prompt_token_ids=prompt,
            token_ids=(*reversed(prompt), staleness),
            logprobs=(-0.5,) * (len(prompt) + 1),
            text="",
            finish_reason="stop",
            spans=(VersionSpan(installed=installed, start=0, end=len(prompt) + 1),),
            staleness=staleness,
            engine_id="e",
        )


class CharTokenizer:
    """Text -> code points; a conversation is its contents behind a mark."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert tokenize
        return [1, *(ord(c) for message in messages for c in message["content"])]


def trainer(step: int = 0, group: int = 2) -> SimpleNamespace:
    """Return the parts of a GRPOTrainer that are looked at."""
    return SimpleNamespace(
        num_generations=group,
        processing_class=CharTokenizer(),
        state=SimpleNamespace(global_step=step),
    )


def test_each_group_becomes_one_request() -> None:
    """A prompt that TRL repeats is asked for once, with n choices, and spread out again."""
    client = EchoClient()
    rollouts = Rollouts(client, sampling=Sampling(max_tokens=4))
    answer = rollouts(["ab", "ab", "cd", "cd"], trainer())
    prompts, sampling = client.asked[0]
    assert prompts == [[97, 98], [99, 100]]
    assert sampling.n == 2
    assert answer["prompt_ids"] == [[97, 98], [97, 98], [99, 100], [99, 100]]
    assert answer["completion_ids"] == [[98, 97, 0], [98, 97, 1], [100, 99, 0], [100, 99, 1]]
    assert answer["staleness"] == [0, 1, 0, 1]
    assert all(len(each) == 3 for each in answer["logprobs"])
    assert rollouts.staleness() == 0.5


def test_prompts_that_are_not_repeated_are_asked_one_by_one() -> None:
    """Evaluation hands each prompt over once."""
    client = EchoClient()
    answer = Rollouts(client, sampling=Sampling())(["a", "b", "c"], trainer())
    assert client.asked[0][1].n == 1
    assert len(answer["completion_ids"]) == 3


def test_seed_changes_with_the_step_and_is_repeatable() -> None:
    """Equal prompts of two steps do not draw equal samples; the same step does again."""
    client = EchoClient()
    rollouts = Rollouts(client, sampling=Sampling(seed=7))
    for step in (0, 1, 0):
        rollouts(["a", "a"], trainer(step))
    seeds = [sampling.seed for _, sampling in client.asked]
    assert seeds[0] == seeds[2] != seeds[1]


def test_conversations_go_through_the_chat_template() -> None:
    """A list of messages is not a text."""
    client = EchoClient()
    talk = [{"role": "user", "content": "x"}]
    Rollouts(client, sampling=Sampling())([talk, talk], trainer())
    assert client.asked[0][0] == [[1, 120]]


def test_no_prompt_is_refused() -> None:
    """An empty slice has no completion."""
    with pytest.raises(ValueError, match="no prompt"):
        Rollouts(EchoClient(), sampling=Sampling())([], trainer())
