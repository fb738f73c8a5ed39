"""Two-digit addition: problems, tokenizer, model configuration, reward.

Everything here is a pure function of its arguments, so that trainer, rollout engines and tests
agree on the task without talking to each other.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+="
ANSWER_DIGITS = 3
# The answer and its end mark: a policy that needs more has not understood the format.
MAX_NEW_TOKENS = ANSWER_DIGITS + 1
HIGHEST = 99


@dataclass(frozen=True)
class Problem:
    """One sum of two numbers of at most two digits."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question as the model reads it; fixed width, so that batches need no padding."""
        return f"{self.left:02d}+{self.right:02d}="

    @property
    def answer(self) -> str:
        """The right answer, always three digits, units first.

        That is the order in which one adds by hand: every carry is known when it is needed, which
        makes the first phase shorter and much the same length for every seed.
        """
        return f"{self.left + self.right:0{ANSWER_DIGITS}d}"[::-1]


def problems(count: int, seed: int) -> list[Problem]:
    """Draw problems uniformly; equal seeds give equal problems on every machine."""
    rng = random.Random(seed)  # noqa: S311  a data set, not a secret
    return [Problem(rng.randint(0, HIGHEST), rng.randint(0, HIGHEST)) for _ in range(count)]


def parse_prompt(prompt: str) -> Problem:
    """Read a problem back from its prompt, so that the reward needs no second column."""
    left, right = prompt.rstrip("=").split("+")
    return Problem(int(left), int(right))


def reward(problem: Problem, completion: str) -> float:
    """Score a completion in [0, 1]: half for single digits in place, half for the exact answer.

    Only a completion of exactly three digits scores at all. The partial credit tells a nearly
    right answer from a wrong one; without it groups in which nobody is right teach nothing.
    """
    if len(completion) != ANSWER_DIGITS or not completion.isdigit():
        return 0.0
    hits = sum(a == b for a, b in zip(completion, problem.answer, strict=True))
    return 0.5 * hits / ANSWER_DIGITS + 0.5 * (hits == ANSWER_DIGITS)


def rewards(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Score a batch of completions against the prompts that they answer."""
    pairs = zip(prompts, completions, strict=True)
    return [reward(parse_prompt(prompt), completion) for prompt, completion in pairs]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, and no file to download."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Describe the model: Qwen3 in miniature, 1.3 M parameters, most of them in two blocks."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.0625,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def save_task(directory: Path) -> None:
    """Write configuration and tokenizer, all that an engine needs to start without weights."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    build_config(tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    save_task(Path(sys.argv[1]))
