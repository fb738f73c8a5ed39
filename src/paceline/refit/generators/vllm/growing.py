"""Choices while they grow, told as far as it is certain which weights made their tokens.

vLLM names the versions behind a choice's tokens when the choice has ended. Until an update begins
there is no doubt: weights change in updates only, so whatever has come was made by those that were
in when the request came. Tokens that come later are held back until vLLM has said what they are.
"""

from collections.abc import Sequence
from typing import Any

from paceline.refit.errors import EngineNotReadyError, GenerationError
from paceline.refit.generators.protocol import (
    Choice,
    ChoicePiece,
    InstalledVersion,
    OnPiece,
    VersionSpan,
    whole_piece,
)
from paceline.refit.generators.workers import WorkersEngine


class GrowingChoice:
    """One choice, put together from what vLLM says of it bit by bit."""

    def __init__(self, index: int) -> None:
        """Have no tokens yet; ``index`` is its place among the prompt's choices."""
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._labels: Sequence[Any] = ()
        self._told = self._told_chars = 0

    def add(self, output: Any) -> None:
        """Take a ``CompletionOutput`` that holds what is new."""
        pairs = zip(output.token_ids, output.logprobs or (), strict=True)
        self.logprobs += [float(found[token_id].logprob) for token_id, found in pairs]
        self.token_ids += output.token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason
        self._labels = output.weight_versions or ()

    def rest(self, spans: tuple[VersionSpan, ...]) -> ChoicePiece:
        """Return what has not been told yet, with the versions behind it, and count it as told."""
        piece = ChoicePiece(
            index=self.index,
            token_ids=tuple(self.token_ids[self._told :]),
            logprobs=tuple(self.logprobs[self._told :]),
            text=self.text[self._told_chars :],
            spans=_cut(spans, self._told),
            finish_reason=self.finish_reason,
        )
        self._told, self._told_chars = len(self.token_ids), len(self.text)
        return piece

    def finished(self, workers: WorkersEngine) -> Choice:
        """Return the whole.

        Raises:
            EngineNotReadyError: an update ended it.
            GenerationError: vLLM does not say which weights produced which tokens.
        """
        if self.finish_reason is None or self.finish_reason == "abort":
            raise EngineNotReadyError("an update ended the request; ask again")
        return Choice(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=self.text,
            finish_reason=self.finish_reason,
            spans=self._spans(workers),
        )

    def check_told(self, choice: Choice, by: InstalledVersion) -> None:
        """Raise GenerationError if tokens were told to be of ``by``, and are not."""
        first = choice.spans[0] if choice.spans else None
        if self._told and (first is None or first.installed != by or first.end < self._told):
            raise GenerationError(
                f"{self._told} tokens were told to be of {by.version_id}; vLLM says {choice.spans}"
            )

    def _spans(self, workers: WorkersEngine) -> tuple[VersionSpan, ...]:
        spans = []
        for each in self._labels:
            installed = workers.version(each.version)
            if installed is None:
                raise GenerationError(f"tokens of weights {each.version!r}, which nobody installed")
            spans.append(VersionSpan(installed=installed, start=each.start, end=each.end))
        edges = [0] + [span.end for span in spans]
        if [span.start for span in spans] + [len(self.token_ids)] != edges:
            raise GenerationError("vLLM did not say which weights produced which tokens")
        return tuple(spans)


class GrowingAnswer:
    """All choices for one prompt."""

    def __init__(self, workers: WorkersEngine, on_piece: OnPiece | None) -> None:
        """Begin with the request: what is in now makes its tokens, until an update begins.

        Args:
            workers: know which version has which label.
            on_piece: is told of tokens on the way; None tells nobody.
        """
        self._workers = workers
        self._on_piece = on_piece
        self._epoch = workers.epoch
        self._installed = workers.installed()
        self._growing: dict[int, GrowingChoice] = {}

    def add(self, output: Any) -> None:
        """Take what is new of one choice, and tell of it if it is certain what made it."""
        choice = self._growing.setdefault(output.index, GrowingChoice(output.index))
        choice.add(output)
        if self._on_piece is None or self._installed is None or choice.finish_reason is not None:
            return
        if self._workers.is_still(self._epoch):
            end = len(choice.token_ids)
            span = VersionSpan(installed=self._installed, start=0, end=end)
            self._on_piece(choice.rest((span,)))

    def choices(self, wanted: int) -> tuple[Choice, ...]:
        """Return the finished choices, the first one again for those that vLLM did not make.

        Raises:
            EngineNotReadyError, GenerationError: as ``GrowingChoice.finished``.
        """
        choices = [self._finish(each) for _, each in sorted(self._growing.items())]
        if not choices:
            raise EngineNotReadyError("an update ended the request; ask again")
        for index in range(len(choices), wanted):
            choices.append(choices[0])
            if self._on_piece is not None:
                self._on_piece(whole_piece(index, choices[0]))
        return tuple(choices)

    def _finish(self, growing: GrowingChoice) -> Choice:
        choice = growing.finished(self._workers)
        if self._on_piece is not None:
            if self._installed is not None:
                growing.check_told(choice, self._installed)
            self._on_piece(growing.rest(choice.spans))
        return choice


def _cut(spans: Sequence[VersionSpan], start: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the tokens from ``start`` on."""
    return tuple(
        VersionSpan(installed=span.installed, start=max(span.start, start), end=span.end)
        for span in spans
        if span.end > start
    )
