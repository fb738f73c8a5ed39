"""``paceline versions``: look at published weight versions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli.version_files import apply, compose, diff, verify_folder
from paceline.core.errors import ExitStatus, UsageError
from paceline.core.text import printable
from paceline.refit.control.protocol import ControlClient
from paceline.refit.model import InstalledReport, Pin, WeightVersion

if TYPE_CHECKING:
    from paceline.refit.plan.explain import Explanation, SourceLine

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT_S = 10.0
DIGEST_CHARS = 12
"""Enough of a root digest to compare by eye; --json has all of it."""
WIDTH_MAX = 1000
"""Of a table; a terminal breaks the lines that are too long for it."""


@click.group()
def versions() -> None:
    """Published weight versions: which there are, who offers and who reads them."""


versions.add_command(diff)
versions.add_command(compose)
versions.add_command(apply)


def _connection(command: F) -> F:
    """Add the options that say where the control service is and who asks."""
    options = (
        click.option("--control", "address", help="HOST:PORT of the service."),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            help="The service's own token file; its operator token is used.",
        ),
        click.option(
            "--credentials",
            type=click.Path(path_type=Path),
            help="A role's credentials file; default: where PACELINE_CREDENTIALS points.",
        ),
        click.option(
            "--ca",
            type=click.Path(path_type=Path),
            help="PEM certificate to trust, over TLS; default: where PACELINE_CONTROL_CA points.",
        ),
        click.option("--insecure-plaintext", is_flag=True, help="Admit an address elsewhere."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@versions.command("ls")
@click.option("--model", "model_name", required=True, help="Name of the model.")
@click.option("--run", "run_id", help="Only versions of this run.")
@_connection
def list_versions(*, model_name: str, run_id: str | None, as_json: bool, **connection: Any) -> None:
    """List versions of a model, oldest first."""
    plane = _connect(**connection)
    try:
        found = plane.list_versions(model_name, run_id=run_id)
    finally:
        plane.close()
    if as_json:
        click.echo(json.dumps({"versions": [asdict(version) for version in found]}))
    else:
        _print_table(
            ("version", "state", "payload", "base", "sequence", "step", "bytes", "root digest"),
            [_row(version) for version in found],
        )


@versions.command()
@click.argument("uid")
@_connection
def show(*, uid: str, as_json: bool, **connection: Any) -> None:
    """Show one version with its shards and leases."""
    plane = _connect(**connection)
    try:
        version = plane.get_version(uid)
        shards = plane.list_shards(uid)
        leases = plane.list_leases(uid)
    finally:
        plane.close()
    if as_json:
        parts = {"shards": [asdict(s) for s in shards], "leases": [asdict(le) for le in leases]}
        click.echo(json.dumps({"version": asdict(version), **parts}))
        return
    _print_table(("field", "value"), _fields(version))
    click.echo()
    _print_table(
        ("slot", "worker", "tensors", "bytes", "manifest"),
        [
            (
                s.source_slot_id,
                s.worker_id,
                str(s.tensor_count),
                str(s.total_bytes),
                s.manifest_endpoint,
            )
            for s in shards
        ],
    )
    click.echo()
    _print_table(
        ("lease", "reader", "expires (unix ms)"),
        [(le.lease_id, le.worker_id, str(le.expires_at_unix_ms)) for le in leases],
    )


@versions.command()
@click.argument("version")
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True),
    help="The checkpoint that a version folder applies to.",
)
@_connection
def verify(*, version: str, base: Path | None, as_json: bool, **connection: Any) -> int:
    """Check that VERSION can be installed; exit status 50 if it cannot.

    A folder written by `versions diff` or `compose` is proven by itself, with --base against the
    checkpoint that it applies to. For any other name the control service is asked for its chain
    back to a full version: every one READY, described, on the root digest that it names, every
    slot offered. With --credentials every manifest is fetched and compared with its advertised
    digest too, and with the run's signature if they hold its key.
    """
    folder = Path(version)
    if folder.is_dir():
        verify_folder(folder, base=base, as_json=as_json)
        return int(ExitStatus.OK)
    return _verify_published(version, as_json=as_json, **connection)


@versions.command()
@click.option("--model", "model_name", required=True, help="Name of the model.")
@click.option("--run", "run_id", help="Only versions of this run.")
@click.option("--worker", "worker_id", default="", help="An engine; default: one that comes new.")
@click.option(
    "--from",
    "from_sequence",
    type=click.IntRange(min=0),
    help="Suppose that it holds this sequence.",
)
@_connection
def explain(
    *,
    model_name: str,
    run_id: str | None,
    worker_id: str,
    from_sequence: int | None,
    as_json: bool,
    **connection: Any,
) -> None:
    """Say what an engine would install now, which ways were weighed, and who has the bytes."""
    from paceline.refit import compose

    plane = _connect(**connection)
    try:
        found = compose.explain_versions(
            plane,
            model_name=model_name,
            run_id=run_id,
            worker_id=worker_id,
            from_sequence=from_sequence,
        )
    finally:
        plane.close()
    if as_json:
        click.echo(json.dumps(found.to_fields()))
    else:
        _print_explanation(found)


def _print_explanation(found: "Explanation") -> None:
    """Print the sentence, the ways that were weighed, and who has each version of the plan."""
    click.echo(f"{found.plan.kind.value}: {found.plan.reason}")
    if found.plan.options:
        click.echo()
        _print_table(
            ("way", "versions", "to sequence", "bytes", "seconds"),
            [
                (
                    option.kind.value,
                    " ".join(option.uids),
                    str(option.sequence),
                    str(option.payload_bytes),
                    "-" if option.seconds is None else f"{option.seconds:.2f}",
                )
                for option in found.plan.options
            ],
        )
    for uid, lines in found.sources.items():
        click.echo()
        columns = (f"sources of {uid}", "role", "region", "has", "MB/s", "")
        _print_table(columns, [_source_row(line) for line in lines])


def _source_row(line: "SourceLine") -> Sequence[str]:
    rate = "-" if line.bytes_per_s is None else f"{line.bytes_per_s / 1e6:.1f}"
    return (line.worker_id, line.role, line.region or "-", f"{line.share:.0%}", rate, line.note)


@versions.command()
@click.argument("uid")
@click.option("--workers", required=True, help="A worker id, or a pattern with * and ?.")
@click.option("--dry-run", is_flag=True, help="Only say which living engines would follow.")
@_connection
def pin(*, uid: str, workers: str, dry_run: bool, as_json: bool, **connection: Any) -> None:
    """Have engines serve version UID instead of the newest, until they are unpinned.

    They go back over a full version, and say `stale` until they have arrived. Of several patterns
    that an engine's id matches the longest counts. Patterns count for engines to come too.
    """
    plane = _connect(**connection)
    try:
        wanted = Pin(model_name=plane.get_version(uid).model_name, workers=workers, version_id=uid)
        if not dry_run:
            plane.set_pin(wanted)
        reports = _matching(plane, wanted)
    finally:
        plane.close()
    _print_pins([(wanted, reports)], as_json=as_json)


@versions.command()
@click.option("--model", "model_name", required=True, help="Name of the model.")
@click.option("--workers", required=True, help="The pattern, as it was pinned.")
@_connection
def unpin(*, model_name: str, workers: str, as_json: bool, **connection: Any) -> None:
    """Let engines follow the newest version again."""
    plane = _connect(**connection)
    freed = Pin(model_name=model_name, workers=workers, version_id="")
    try:
        plane.set_pin(freed)
        reports = _matching(plane, freed)
    finally:
        plane.close()
    _print_pins([(freed, reports)], as_json=as_json)


@versions.command()
@click.option("--model", "model_name", required=True, help="Name of the model.")
@_connection
def pins(*, model_name: str, as_json: bool, **connection: Any) -> None:
    """List which engines are pinned to which version, and what they serve now."""
    plane = _connect(**connection)
    try:
        found = [(each, _matching(plane, each)) for each in plane.list_pins(model_name)]
    finally:
        plane.close()
    _print_pins(found, as_json=as_json)


def _matching(plane: ControlClient, pin: Pin) -> Sequence[InstalledReport]:
    """Return what the living engines of a pattern serve now."""
    reports = plane.list_installed(pin.model_name)
    return [each for each in reports if fnmatchcase(each.worker_id, pin.workers)]


def _print_pins(found: Sequence[tuple[Pin, Sequence[InstalledReport]]], *, as_json: bool) -> None:
    if as_json:
        documents = [
            {**asdict(pin), "engines": [asdict(each) for each in reports]} for pin, reports in found
        ]
        click.echo(json.dumps({"pins": documents}))
        return
    _print_table(
        ("engines", "pinned to", "engine", "state", "serves"),
        [
            (pin.workers, pin.version_id or "the newest", *engine)
            for pin, reports in found
            for engine in (
                [(each.worker_id, each.state, each.version_id or "-") for each in reports]
                or [("none lives", "-", "-")]
            )
        ],
    )


def _verify_published(uid: str, *, as_json: bool, **connection: Any) -> int:
    from paceline.refit import compose

    plane = _connect(**connection)
    given = connection["credentials"]
    credentials = compose.load_credentials(given) if given else None
    try:
        problems = compose.verify_version(plane, uid, credentials=credentials)
    finally:
        plane.close()
    if as_json:
        click.echo(json.dumps({"version": uid, "ok": not problems, "problems": list(problems)}))
    elif problems:
        _print_table(("problem",), [(problem,) for problem in problems])
    else:
        click.echo(f"{uid} can be installed from nothing")
    return int(ExitStatus.REFIT_FAILED if problems else ExitStatus.OK)


def _connect(
    *,
    address: str | None,
    token_file: Path | None,
    credentials: Path | None,
    insecure_plaintext: bool,
    ca: Path | None,
) -> ControlClient:
    from paceline.refit import compose

    if address is None:
        raise UsageError("say where the control service is: --control HOST:PORT")
    token = None if token_file else compose.load_credentials(credentials).control_token
    return compose.connect_control(
        address,
        token=token,
        token_file=token_file,
        timeout_s=TIMEOUT_S,
        allow_plaintext=insecure_plaintext,
        trusted_file=ca,
    )


def _row(version: WeightVersion) -> Sequence[str]:
    described = version.description
    return (
        version.uid,
        version.state.value,
        version.payload_format.value,
        version.base_version_id or "-",
        str(described.sequence) if described else "-",
        str(described.step) if described else "-",
        str(described.payload_bytes) if described else "-",
        described.root_digest[:DIGEST_CHARS] if described else "-",
    )


def _fields(version: WeightVersion) -> Sequence[Sequence[str]]:
    """Return every field that has a value, the description's included."""
    fields = asdict(version)
    fields.update(fields.pop("description") or {})
    return [(name, _text(value)) for name, value in fields.items() if value not in (None, "", ())]


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as what is in it: names that are cut name nothing."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        # Text, because names come from outside and must not be read as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(width=WIDTH_MAX)
    needed = Measurement.get(console, console.options, table).maximum
    console.print(table, width=needed, crop=False, soft_wrap=True)
