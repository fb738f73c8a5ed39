"""Canonical names of what can be rented, ``<gpu>-<n>x``, and each provider's words for them.

A canonical name stands for one or several boards: ``h100`` for any H100 board, ``h100-sxm`` for
one of them. Where providers sell two sizes of memory under one name, the bare name is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import UsageError

_TARGET = re.compile(r"([a-z][a-z0-9]*(?:-[a-z0-9]+)*)-([1-9][0-9]{0,3})x")

VAST: Final = "vast"
RUNPOD: Final = "runpod"
LAMBDA: Final = "lambda"
NEBIUS: Final = "nebius"
SELLERS: Final = frozenset({VAST, RUNPOD, LAMBDA, NEBIUS})
"""Who sells nothing but what is in the table below."""

_BAND = (0.93, 1.09)
"""Share of the marketed memory within which a card reports: 24564 MiB of 24 GB, 143771 of 141."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A kind of processor and how many of them in one machine."""

    gpu: str
    count: int

    def __str__(self) -> str:
        """Return the canonical token."""
        return f"{self.gpu}-{self.count}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One kind of GPU board, and what each provider calls it."""

    name: str
    """The narrowest canonical name, ``h100-sxm``."""
    family: str
    """The name that also stands for its siblings, ``h100``."""
    memory_gb: int
    """Of one GPU, as marketed."""
    tokens: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Provider -> its words; a provider that is missing does not have the board."""
    widths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Provider -> how many per machine it sells; one that is missing sells any number."""
    is_arm: bool = False
    """The host's processor is arm64: images and wheels for x86 fail there."""

    def fits_memory_mb(self, memory_mb: float) -> bool:
        """Return whether one GPU that reports so many MiB can be this board."""
        low, high = _BAND
        return low * self.memory_gb * 1024 <= memory_mb <= high * self.memory_gb * 1024

    def is_sold(self, provider: str, count: int) -> bool:
        """Return whether ``provider`` sells ``count`` of them in one machine, as far as known."""
        if provider not in self.tokens:
            return False
        widths = self.widths.get(provider)
        return widths is None or count in widths


def _board(  # noqa: PLR0913 - the columns of the table below
    name: str,
    memory_gb: int,
    *,
    family: str | None = None,
    vast: str = "",
    runpod: str = "",
    lambda_: str = "",
    nebius: str = "",
    is_arm: bool = False,
) -> Board:
    """Return a row of the table.

    A cell is ``word|word``, with ``:1,2,8`` where only such widths are sold. Lambda's words have
    the width in them: ``gpu_{1,2}x_a6000`` is two of them.
    """
    tokens: dict[str, tuple[str, ...]] = {}
    widths: dict[str, tuple[int, ...]] = {}
    for provider, cell in {VAST: vast, RUNPOD: runpod, NEBIUS: nebius}.items():
        words, _, numbers = cell.partition(":")
        if words:
            tokens[provider] = tuple(words.split("|"))
        if numbers:
            widths[provider] = tuple(int(number) for number in numbers.split(","))
    if lambda_:
        types = _lambda_types(lambda_)
        tokens[LAMBDA] = tuple(types)
        widths[LAMBDA] = tuple(sorted(set(types.values())))
    return Board(
        name=name,
        family=family or name,
        memory_gb=memory_gb,
        tokens=tokens,
        widths=widths,
        is_arm=is_arm,
    )


def _lambda_types(cell: str) -> dict[str, int]:
    """Return the type names in a cell, each with its width."""
    types: dict[str, int] = {}
    for word in cell.split("|"):
        found = re.fullmatch(r"gpu_\{?([0-9,]+)\}?x_([a-z0-9_]+)", word)
        if found is None:
            raise ValueError(f"no machine type of Lambda: {word!r}")
        for width in found.group(1).split(","):
            types[f"gpu_{width}x_{found.group(2)}"] = int(width)
    return types


# fmt: off
BOARDS: Final = (
    _board("rtx3090", 24, vast="RTX 3090", runpod="NVIDIA GeForce RTX 3090"),
    _board("rtx4090", 24, vast="RTX 4090", runpod="NVIDIA GeForce RTX 4090"),
    _board("rtx5090", 32, vast="RTX 5090", runpod="NVIDIA GeForce RTX 5090"),
    _board("l4", 24, vast="L4", runpod="NVIDIA L4"),
    _board("l40", 48, vast="L40", runpod="NVIDIA L40"),
    _board("l40s", 48, vast="L40S", runpod="NVIDIA L40S", nebius="gpu-l40s-a|gpu-l40s-d"),
    _board("a10", 24, vast="A10", lambda_="gpu_1x_a10"),
    _board("a40", 48, vast="A40", runpod="NVIDIA A40"),
    _board("a5000", 24, vast="RTX A5000", runpod="NVIDIA RTX A5000"),
    _board("a6000", 48, vast="RTX A6000", runpod="NVIDIA RTX A6000", lambda_="gpu_{1,2,4}x_a6000"),
    _board("quadro6000", 24, lambda_="gpu_1x_rtx6000"),
    _board("rtx6000ada", 48, vast="RTX 6000Ada", runpod="NVIDIA RTX 6000 Ada Generation"),
    # words on Vast unverified
    _board("blackwell6000-server", 96, family="blackwell6000", vast="RTX PRO 6000 S",
           runpod="NVIDIA RTX PRO 6000 Blackwell Server Edition", nebius="gpu-rtx6000"),
    _board("blackwell6000-workstation", 96, family="blackwell6000", vast="RTX PRO 6000 WS",
           runpod="NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    # RunPod's full words for the V100 and the B300 are not known for sure, so they are left out
    _board("v100-16gb", 16, vast="Tesla V100", lambda_="gpu_8x_v100|gpu_8x_v100_n"),
    _board("v100-32gb", 32, vast="Tesla V100"),
    _board("a100-40gb-pcie", 40, family="a100-40gb", vast="A100 PCIE", lambda_="gpu_{1,2,4}x_a100"),
    # gpu_8x_a100 has the SXM4 board, gpu_1x_a100 the PCIe one
    _board("a100-40gb-sxm", 40, family="a100-40gb", vast="A100 SXM4",
           lambda_="gpu_1x_a100_sxm4|gpu_8x_a100"),
    _board("a100-80gb-pcie", 80, family="a100-80gb", vast="A100 PCIE",
           runpod="NVIDIA A100 80GB PCIe"),
    _board("a100-80gb-sxm", 80, family="a100-80gb", vast="A100 SXM4",
           runpod="NVIDIA A100-SXM4-80GB", lambda_="gpu_8x_a100_80gb_sxm4"),
    _board("h100-pcie", 80, family="h100", vast="H100 PCIE", runpod="NVIDIA H100 PCIe",
           lambda_="gpu_1x_h100_pcie"),
    _board("h100-sxm", 80, family="h100", vast="H100 SXM", runpod="NVIDIA H100 80GB HBM3",
           lambda_="gpu_{1,2,4,8}x_h100_sxm5", nebius="gpu-h100-sxm:1,8"),
    _board("h100-nvl", 94, family="h100", vast="H100 NVL", runpod="NVIDIA H100 NVL"),
    _board("gh200", 96, lambda_="gpu_1x_gh200", is_arm=True),
    _board("h200", 141, vast="H200", runpod="NVIDIA H200", nebius="gpu-h200-sxm:1,8"),
    _board("b200", 180, vast="B200", runpod="NVIDIA B200", lambda_="gpu_{1,2,8}x_b200_sxm6",
           nebius="gpu-b200-sxm|gpu-b200-sxm-a:1,8"),
    _board("b300", 270, vast="B300|B300 PC", nebius="gpu-b300-sxm:1,8"),
)
# fmt: on

_AMBIGUOUS: Final = {
    "a100": ("a100-40gb", "a100-80gb"),
    "v100": ("v100-16gb", "v100-32gb"),
    "rtx6000": ("quadro6000", "rtx6000ada", "blackwell6000"),
}
"""Names that providers sell different things under, which differ in memory and price."""

_LAMBDA_TYPE = re.compile(r"gpu_([1-9][0-9]?)x_([a-z0-9_]{1,60})")


def parse_target(text: str) -> GpuTarget:
    """Return what ``text`` names: ``h100-8x``, ``a100-80gb-1x``, ``cpu-2x``.

    Raises:
        UsageError: not of that form, or a name that stands for different things.
    """
    found = _TARGET.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{text!r} is no machine: write <gpu>-<n>x in lower case, such as h100-1x, "
            "rtx4090-2x or cpu-1x"
        )
    gpu, count = found.group(1), int(found.group(2))
    if gpu in _AMBIGUOUS:
        choices = " or ".join(f"{choice}-{count}x" for choice in _AMBIGUOUS[gpu])
        difference = " with 40 and with 80 GB" if gpu == "a100" else " with different memory"
        raise UsageError(f"{text!r} is sold{difference}; write {choices}")
    return GpuTarget(gpu=gpu, count=count)


def boards_of(gpu: str) -> tuple[Board, ...]:
    """Return the boards that a canonical name stands for; none for a name that nobody knows."""
    return tuple(board for board in BOARDS if gpu in (board.name, board.family))


def boards_sold(target: GpuTarget, provider: str) -> tuple[Board, ...]:
    """Return the boards of ``target`` that ``provider`` sells in that width.

    Raises:
        UsageError: nobody knows the name, or the provider has it not, or not so wide.
    """
    boards = boards_of(target.gpu)
    if not boards:
        known = ", ".join(sorted({board.family for board in BOARDS}))
        raise UsageError(f"{target.gpu!r} is no GPU that is known here; known: {known}")
    sold = tuple(board for board in boards if board.is_sold(provider, target.count))
    if sold:
        return sold
    widths = sorted({width for board in boards for width in board.widths.get(provider, ())})
    if widths:
        wide = ", ".join(f"{target.gpu}-{width}x" for width in widths)
        raise UsageError(f"{provider} does not sell {target}; it sells {wide}")
    having = ", ".join(sorted({name for board in boards for name in board.tokens}))
    raise UsageError(f"{provider} has no {target.gpu}; it is sold by {having}")


def words_of(target: GpuTarget, provider: str) -> dict[str, tuple[Board, ...]]:
    """Return the provider's words for a target, each with the boards that it can mean.

    Raises UsageError as ``boards_sold``.
    """
    words: dict[str, tuple[Board, ...]] = {}
    for board in boards_sold(target, provider):
        for word in board.tokens[provider]:
            words[word] = (*words.get(word, ()), board)
    return words


def board_of(provider: str, word: str, *, memory_mb: float | None = None) -> Board | None:
    """Return the board behind a provider's word, or None if that is not known for sure.

    ``memory_mb`` of one GPU decides where a word means boards of different memory.
    """
    found = [board for board in BOARDS if word in board.tokens.get(provider, ())]
    if memory_mb is not None:
        found = [board for board in found if board.fits_memory_mb(memory_mb)]
    return found[0] if len(found) == 1 else None


def lambda_types(target: GpuTarget) -> dict[str, Board]:
    """Return Lambda's machine types for a target, which have the width in their name.

    Raises UsageError as ``boards_sold``.
    """
    return {
        name: board
        for board in boards_sold(target, LAMBDA)
        for name in board.tokens[LAMBDA]
        if lambda_width(name) == target.count
    }


def lambda_width(type_name: str) -> int | None:
    """Return how many GPUs a machine type of Lambda has by its name, or None if it is no such."""
    found = _LAMBDA_TYPE.fullmatch(type_name)
    return None if found is None else int(found.group(1))
