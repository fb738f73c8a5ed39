"""Installing one version: everything is fetched and proven before the engine pauses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from paceline.core.clock import Clock
from paceline.refit.apply import (
    Checks,
    StagedInstall,
    prove_live,
    stage_install,
    write_install,
)
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import UncertainStateError, VerifyError
from paceline.refit.generators.protocol import (
    GeneratorEngineAdapter,
    InstalledVersion,
    device_tensors_of,
)
from paceline.refit.kernels.registry import process_tools
from paceline.refit.manifest.signature import Trust, statement_of
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import Shard, TensorEntry, VersionDescription, WeightVersion
from paceline.refit.plan import Costs
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts
from paceline.refit.receiver.lease import hold_lease
from paceline.refit.receiver.spread import Spread
from paceline.refit.transports.protocol import ObjectReader, TransferRecord

PAYLOAD_SLACK_BYTES = 2**20
"""Headers, alignment and the overhead of compression that found nothing to compress."""


STEP_S = 0.1
"""Of an install, whatever its size, when a plan weighs one step against several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallLimits:
    """Bounds of one install."""

    lease_ttl_s: int = 60
    read_timeout_s: float = 20.0
    """For one manifest or one chunk of at most 64 MiB."""
    fetch: FetchLimits = field(default_factory=FetchLimits)
    """The rest of what bounds a fetch."""
    safe_point_timeout_s: float = 60.0
    whole_check_every: int = 1
    """Every so many installs all live bytes are hashed, before and after; between them only what
    changes is proven. 1: always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """From whom versions come besides their trainer, and whose word is taken for them."""

    verify_key: Ed25519PublicKey | None = None
    """Whose signature every manifest must have; None takes what the control service names."""
    spread: Spread | None = None
    """The other receivers; None reads from the advertised sources alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A version that is live, proven by reading the live bytes back."""

    version: InstalledVersion
    entries: Mapping[str, TensorEntry]
    """What every live tensor is now: the base of the next delta."""
    fetched_bytes: int
    pause_s: float
    transfers: tuple[TransferRecord, ...] = ()
    """Every run of a transport that the install took, also those that failed."""


class Installs(Protocol):
    """Carries versions into an engine, wherever that engine's weights are."""

    def install(
        self,
        version: WeightVersion,
        *,
        base: Mapping[str, TensorEntry] | None,
        between_reads: Callable[[], None],
    ) -> Installed:
        """Install ``version`` or leave the engine as it was, see Installer.install."""
        ...

    def check_live(self, entries: Mapping[str, TensorEntry]) -> None:
        """Hash everything that is live. Raises VerifyError if it is not what the entries say."""
        ...

    def costs(self) -> Costs:
        """Return what steps cost here, as measured so far."""
        ...

    def keep_only(self, uids: frozenset[str]) -> None:
        """Stop serving versions on that are not among these."""
        ...


class Installer:
    """Carries versions from their sources into one engine."""

    def __init__(  # noqa: PLR0913 - parts of its own; what it is supplied from has a default
        self,
        *,
        worker_id: str,
        control: ControlPlane,
        engine: GeneratorEngineAdapter,
        reader: ObjectReader,
        clock: Clock,
        limits: InstallLimits,
        supply: Supply | None = None,
        prepare: Callable[[Manifest], None] | None = None,
    ) -> None:
        """Take the parts; ``prepare`` is told what comes, before live tensors are asked for."""
        self._worker_id = worker_id
        self._control = control
        self._engine = engine
        self._reader = reader
        self._supply = supply or Supply()
        self._clock = clock
        self._limits = limits
        self._prepare = prepare
        self._tools = process_tools()
        self._since_whole_check = 0
        self._transfers: list[TransferRecord] = []

    def install(
        self,
        version: WeightVersion,
        *,
        base: Mapping[str, TensorEntry] | None,
        between_reads: Callable[[], None],
    ) -> Installed:
        """Install ``version`` or leave the engine exactly as it was.

        Args:
            version: READY and described.
            base: what the live tensors are; None if that is not known, then only a full one goes.
            between_reads: called often while bytes arrive; what it raises ends the install.

        Raises:
            ControlError: no lease, or the service is away.
            FetchError, VerifyError, ApplyError, DeadlineExceededError: nothing has changed.
            UncertainStateError: the live tensors are neither the old nor the new version.
        """
        said = require_description(version)
        self._transfers = []
        with hold_lease(
            self._control,
            version_id=version.uid,
            worker_id=self._worker_id,
            ttl_s=self._limits.lease_ttl_s,
            clock=self._clock,
        ) as lease:

            def keep_alive() -> None:
                lease.renew_if_due()
                between_reads()

            checks = self._next_checks(base)
            staged, fetched_bytes = self._stage(
                version, base=base, checks=checks, keep_alive=keep_alive
            )
            label = InstalledVersion(
                version_id=version.uid, sequence=said.sequence, root_digest=said.root_digest
            )
            pause_s = self._engine.at_safe_point(
                self._writer(staged, base),
                installed=label,
                timeout_s=self._limits.safe_point_timeout_s,
            )
            self._prove(staged, label, checks)
        return Installed(
            version=label,
            entries={entry.name: entry for entry in staged.entries},
            fetched_bytes=fetched_bytes,
            pause_s=pause_s,
            transfers=tuple(self._transfers),
        )

    def costs(self) -> Costs:
        """Return what steps cost here, as measured so far."""
        rates = {} if self._supply.spread is None else self._supply.spread.rates()
        return Costs(bytes_per_s=max(rates.values(), default=None), step_s=STEP_S)

    def keep_only(self, uids: frozenset[str]) -> None:
        """Stop serving versions on that are not among these."""
        if self._supply.spread is not None:
            self._supply.spread.keep_only(uids)

    def stage(
        self,
        version: WeightVersion,
        *,
        base: Mapping[str, TensorEntry] | None,
        between_reads: Callable[[], None],
    ) -> tuple[StagedInstall, int]:
        """Fetch and prove everything under a lease, and write nothing; see ``install``.

        Returns:
            What can be written, and how many bytes were fetched for it.
        """
        with hold_lease(
            self._control,
            version_id=version.uid,
            worker_id=self._worker_id,
            ttl_s=self._limits.lease_ttl_s,
            clock=self._clock,
        ) as lease:

            def keep_alive() -> None:
                lease.renew_if_due()
                between_reads()

            checks = self._next_checks(base)
            return self._stage(version, base=base, checks=checks, keep_alive=keep_alive)

    def check_live(self, entries: Mapping[str, TensorEntry]) -> None:
        """Hash everything that is live. Raises VerifyError if it is not what the entries say."""
        prove_live(self._engine.live_tensors(), entries.values())
        self._prove_device(entries.values())

    def _stage(
        self,
        version: WeightVersion,
        *,
        base: Mapping[str, TensorEntry] | None,
        checks: Checks,
        keep_alive: Callable[[], None],
    ) -> tuple[StagedInstall, int]:
        """Fetch and prove; the engine runs on meanwhile and nothing of it is touched."""
        fetcher = Fetcher(
            self._reader,
            FetchParts(
                clock=self._clock,
                between_reads=keep_alive,
                on_record=self._transfers.append,
                limits=replace(self._limits.fetch, read_timeout_s=self._limits.read_timeout_s),
                trust=self._trust_in(version),
                spread=self._supply.spread,
            ),
        )
        sources = self._control.list_shards(version.uid)
        slot_id = require_one_slot(version, sources)
        manifest = fetcher.fetch_manifest(sources)
        check_manifest_is_of(manifest, version, slot_id=slot_id)
        if self._prepare is not None:
            self._prepare(manifest)
        live = self._engine.live_tensors()
        live_bytes = sum(len(buffer.data) for buffer in live.values())
        objects = fetcher.fetch_objects(
            manifest, sources, bytes_max=2 * live_bytes + PAYLOAD_SLACK_BYTES
        )
        staged = stage_install(
            manifest,
            objects,
            live=live,
            aliases=self._engine.tensor_aliases(),
            base=base,
            checks=checks,
        )
        return staged, sum(len(data) for data in objects.values())

    def _writer(
        self, staged: StagedInstall, base: Mapping[str, TensorEntry] | None
    ) -> Callable[[], None]:
        """Return what is left to do at the safe point."""
        tensors = device_tensors_of(self._engine)
        if not tensors:
            return lambda: write_install(staged, tools=self._tools)
        from paceline.refit.staging.mirror import DeviceInstall, refresh_device

        if base is not None:
            return DeviceInstall(staged, tensors, tools=self._tools).write

        def write() -> None:  # nothing is known of the device either
            write_install(staged, tools=self._tools)
            refresh_device(tensors, self._engine.live_tensors())

        return write

    def _trust_in(self, version: WeightVersion) -> Trust | None:
        key = self._supply.verify_key
        return None if key is None else Trust(key=key, expected=statement_of(version))

    def _next_checks(self, base: Mapping[str, TensorEntry] | None) -> Checks:
        """Say whether this install reads all live bytes: the first does, and every n-th."""
        self._since_whole_check += 1
        whole = base is None or self._since_whole_check >= self._limits.whole_check_every
        if whole:
            self._since_whole_check = 0
        return Checks(whole=whole, payload=False, tools=self._tools)  # the fetcher has proven it

    def _prove(self, staged: StagedInstall, label: InstalledVersion, checks: Checks) -> None:
        """Read every live byte back; tokens may already flow, so a surprise takes the label."""
        try:
            only = None if checks.whole else ()
            root = prove_live(
                self._engine.live_tensors(), staged.entries, only=only, tools=self._tools
            )
            if checks.whole:
                self._prove_device(staged.entries)
        except VerifyError as exc:
            raise UncertainStateError(
                f"live weights are not version {label.version_id}: {exc}"
            ) from exc
        if root != label.root_digest:
            raise UncertainStateError(f"live weights have root {root}, not {label.root_digest}")

    def _prove_device(self, entries: Iterable[TensorEntry]) -> None:
        """Read what is on a device back, if there is any. Raises VerifyError."""
        tensors = device_tensors_of(self._engine)
        if tensors:
            from paceline.refit.staging.mirror import prove_device

            prove_device(tensors, entries)


def label_of(version: WeightVersion) -> InstalledVersion:
    """Return what an engine calls itself once it has the version. Raises VerifyError."""
    said = require_description(version)
    return InstalledVersion(
        version_id=version.uid, sequence=said.sequence, root_digest=said.root_digest
    )


def require_description(version: WeightVersion) -> VersionDescription:
    """Return what is recorded about a version. Raises VerifyError if nothing is."""
    if version.description is None:
        raise VerifyError(f"version {version.uid} has no description; it cannot be proven")
    return version.description


def require_one_slot(version: WeightVersion, sources: Sequence[Shard]) -> str:
    """Return the one slot that all sources fill.

    Raises:
        VerifyError: there are none, or several: a root digest covers one slot so far.
    """
    slots = {source.source_slot_id for source in sources}
    if len(slots) != 1:
        raise VerifyError(
            f"version {version.uid} has {len(slots)} source slots; this receiver installs "
            "versions of exactly one"
        )
    return slots.pop()


def check_manifest_is_of(manifest: Manifest, version: WeightVersion, *, slot_id: str) -> None:
    """Refuse a manifest that is right in itself and belongs to something else.

    Raises:
        VerifyError: naming what differs from the version's record.
    """
    said = require_description(version)
    pairs = {
        "payload format": (manifest.payload_format, version.payload_format),
        "slot": (manifest.source_slot_id, slot_id),
        "root digest": (manifest.root_digest, said.root_digest),
    }
    if manifest.base_root is not None:
        pairs["base root"] = (manifest.base_root, said.parent_root or "")
    for what, (found, recorded) in pairs.items():
        if found != recorded:
            raise VerifyError(
                f"version {version.uid}: {what} {found} in the manifest, {recorded} on record"
            )
