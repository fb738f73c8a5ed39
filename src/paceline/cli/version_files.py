"""``paceline versions diff | compose | apply | verify``: versions and checkpoints as files."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.refit.inspection import HISTOGRAM_ULPS, TensorDiff

if TYPE_CHECKING:
    from paceline.refit.delta.codec import Tools
    from paceline.refit.inspection import Tensors, Version

_FOLDER = click.Path(path_type=Path)
_EXISTING = click.Path(path_type=Path, exists=True)
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@click.command()
@click.argument("base", type=_EXISTING)
@click.argument("new", type=_EXISTING)
@click.option("--write", "folder", type=_FOLDER, help="Write the delta as a version folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["paceline", "canonical"]),
    default="paceline",
    show_default=True,
    help="Canonical is what ModelExpress receivers read from object storage.",
)
@click.option("--name", help="What it leads to, in canonical; NEW's file name by default.")
@click.option("--base-name", help="What it applies to, in canonical; BASE's file name by default.")
@click.option("--slot", "slot_id", default="file", show_default=True, help="Its source slot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(  # noqa: PLR0913 - one parameter per option
    *,
    base: Path,
    new: Path,
    folder: Path | None,
    form: str,
    name: str | None,
    base_name: str | None,
    slot_id: str,
    as_json: bool,
) -> None:
    """Show what changes from checkpoint BASE to checkpoint NEW, per layer and in each scheme."""
    from paceline.refit import inspection
    from paceline.refit.kernels.registry import process_tools

    if (name or base_name) and (folder is None or form != "canonical"):
        raise click.UsageError("--name and --base-name are for --write with --format canonical")
    tools = process_tools()
    old, now = inspection.read_checkpoint(base), inspection.read_checkpoint(new)
    found = list(inspection.diff_checkpoints(old, now, tools=tools))
    if folder is not None and form == "canonical":
        inspection.write_canonical(
            folder,
            old,
            now,
            version=name or new.stem or "new",
            base_version=base_name or base.stem or "base",
        )
    elif folder is not None:
        version = inspection.make_delta(old, now, slot_id=slot_id, tools=tools)
        inspection.write_version(folder, version)
    if as_json:
        click.echo(json.dumps({"tensors": [asdict(item) for item in found]}))
        return
    for layer, items in _layers(found).items():
        click.echo(_line(layer, items))
    click.echo(_line("all", found))
    click.echo(_ulps_line(found))


@click.command()
@click.argument("first", type=_EXISTING)
@click.argument("second", type=_EXISTING)
@click.argument("result", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compose(*, first: Path, second: Path, result: Path, as_json: bool) -> None:
    """Write the delta RESULT that equals version folders FIRST and then SECOND."""
    from paceline.refit import inspection

    both = inspection.compose_versions(
        inspection.read_version(first), inspection.read_version(second)
    )
    inspection.write_version(result, both)
    sizes = [
        sum(len(data) for data in inspection.read_version(f)[1].values()) for f in (first, second)
    ]
    num_bytes = sum(map(len, both[1].values()))
    found = {"result": str(result), "num_bytes": num_bytes, "num_bytes_apart": sum(sizes)}
    text = f"{num_bytes} bytes instead of {sum(sizes)}"
    click.echo(json.dumps(found) if as_json else text)


@click.command()
@click.argument("version", type=_EXISTING)
@click.argument("checkpoint", type=_EXISTING)
@click.option("--dry-run", is_flag=True, help="Prove that it would apply; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def apply(*, version: Path, checkpoint: Path, dry_run: bool, as_json: bool) -> None:
    """Write version folder VERSION into the files of CHECKPOINT.

    VERSION may be in the canonical format too. Everything is proven before and after. Whatever
    interrupts it, the files are the old version or the new one; what a crash has left is taken
    back by the next call.
    """
    from paceline.refit import inspection
    from paceline.refit.kernels.registry import process_tools

    tools = process_tools()

    def read(base: "Tensors") -> "Version":
        if _is_canonical(version):
            return inspection.read_canonical(version, base, tools=tools)
        return inspection.read_version(version)

    staged = inspection.apply_version(read, checkpoint, tools=tools, dry_run=dry_run)
    if as_json:
        found = {
            "checkpoint": str(checkpoint),
            "root_digest": staged.root_digest,
            "changed_elements": staged.changed_elements,
            "written": not dry_run,
        }
        click.echo(json.dumps(found))
        return
    said = "would change" if dry_run else "changed"
    click.echo(f"{said} {staged.changed_elements} elements; root digest {staged.root_digest}")


def verify_folder(folder: Path, *, base: Path | None, as_json: bool) -> None:
    """Prove a version folder; with its base, that it applies and leads where it says.

    Raises:
        VerifyError: it is not what it says.
    """
    from paceline.refit import inspection
    from paceline.refit.kernels.registry import process_tools

    tools = process_tools()
    weights = None if base is None else inspection.read_checkpoint(base)
    root = inspection.verify_version(_read(folder, base, tools), base=weights, tools=tools)
    if as_json:
        click.echo(json.dumps({"version": str(folder), "ok": True, "root_digest": root}))
    else:
        click.echo(f"{'applies and leads to' if base else 'is whole; root digest'} {root}")


def _read(folder: Path, base: Path | None, tools: "Tools") -> "Version":
    """Read a version folder of either format; the canonical one says nothing without its base."""
    from paceline.refit import inspection

    if not _is_canonical(folder):
        return inspection.read_version(folder)
    if base is None:
        raise click.UsageError(f"{folder} is in the canonical format: add --base CHECKPOINT")
    return inspection.read_canonical(folder, inspection.read_checkpoint(base), tools=tools)


def _is_canonical(folder: Path) -> bool:
    from paceline.refit import inspection

    is_ours = (folder / "manifest.json").exists()
    return not is_ours and (folder / inspection.CANONICAL_INDEX).exists()


def _layers(found: Sequence[TensorDiff]) -> dict[str, list[TensorDiff]]:
    """Group tensors by the numbered block in their name; others stand for themselves."""
    layers: dict[str, list[TensorDiff]] = {}
    for item in found:
        match = _LAYER.match(item.name)
        layers.setdefault(match.group(1) if match else item.name, []).append(item)
    return layers


def _line(title: str, items: Sequence[TensorDiff]) -> str:
    elements = sum(item.num_elements for item in items)
    changed = sum(item.changed_elements for item in items)
    schemes = sorted({scheme for item in items for scheme in item.bytes_by_scheme})
    sizes = ", ".join(
        f"{scheme} {sum(item.bytes_by_scheme.get(scheme, 0) for item in items)}"
        for scheme in schemes
    )
    share = changed / elements if elements else 0.0
    return f"{title}: {share:.4%} of {elements} changed{f'; bytes: {sizes}' if sizes else ''}"


def _ulps_line(found: Sequence[TensorDiff]) -> str:
    edges = [f"<= {edge}" for edge in HISTOGRAM_ULPS] + [f"> {HISTOGRAM_ULPS[-1]}"]
    counts = [sum(item.ulps[i] for item in found) for i in range(len(edges))]
    return "ulps: " + ", ".join(
        f"{edge}: {count}" for edge, count in zip(edges, counts, strict=True)
    )
