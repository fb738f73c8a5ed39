"""Installing one version: everything is fetched and proven before the engine pauses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from paceline.core.clock import Clock
from paceline.refit.apply import (
    Checks,
    StagedInstall,
    check_live,
    prove_base,
    stage_install,
    write_install,
)
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import UncertainStateError, VerifyError
from paceline.refit.generators.protocol import (
    GeneratorEngineAdapter,
    InstalledVersion,
    device_tensors_of,
    loras_of,
    spare_of,
)
from paceline.refit.kernels.registry import process_tools, warm_loops
from paceline.refit.manifest.signature import Trust, trust_in
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer, TensorEntry, WeightVersion
from paceline.refit.parts import FetchedShard, stage_shards
from paceline.refit.plan import Costs
from paceline.refit.receiver.beside import Beside
from paceline.refit.receiver.fetch import Fetcher, FetchLimits, FetchParts, spool_of
from paceline.refit.receiver.gathering import AT_A_TIME_MAX, Turns, fetch_slots
from paceline.refit.receiver.lease import hold_lease
from paceline.refit.receiver.shards import (
    check_manifests_are_of,
    require_description,
    sources_by_slot,
    whole_manifest,
)
from paceline.refit.receiver.spare import SpareSet
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
    """What every live tensor, or part of one, is now, by its key: the base of the next delta."""
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
        self._spool = spool_of(limits.fetch, clock)
        self._spare = self._spare_set()
        self._loras = loras_of(engine)
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
            try:
                staged, fetched_bytes = self._stage(
                    version, base=base, checks=checks, keep_alive=keep_alive
                )
            except VerifyError:
                if self._spare is not None:
                    self._spare.forget()  # it may be the spare set that is not what it should be
                raise
            label = InstalledVersion(
                version_id=version.uid,
                sequence=said.sequence,
                root_digest=said.root_digest,
                model_root="" if self._loras is None else self._loras.model_root,
            )
            pause_s = self._put_in(staged, base, label, checks)
        if self._spare is not None:
            self._spare.follow(staged, whole=checks.whole)
        return Installed(
            version=label,
            entries={entry.key: entry for entry in staged.entries},
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
        self._spool.trim()
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
        check_live(self._engine.live_tensors(), entries.values())
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
        slots = sources_by_slot(version, self._control.list_shards(version.uid))
        with Beside() as beside:
            turns = Turns(keep_alive, beside.check)
            fetchers = {slot: self._fetcher(version, turns) for slot in slots}
            manifests = {slot: fetchers[slot].fetch_manifest(slots[slot]) for slot in slots}
            check_manifests_are_of(manifests, version)
            whole = whole_manifest(list(manifests.values()))
            if self._prepare is not None:
                self._prepare(whole)
            checks = replace(checks, lora=whole.lora if self._loras is not None else None)
            live = self._room_for(whole, base)
            live_bytes = sum(len(buffer.data) for buffer in live.values())
            if checks.whole and len(manifests) == 1 and not whole.is_full:
                beside.start(self._proof_of_base(whole, live, base, checks))
                checks = replace(checks, base=False)
            shards = fetch_slots(
                manifests,
                fetchers,
                slots,
                turns=turns,
                bytes_max=2 * live_bytes + PAYLOAD_SLACK_BYTES,
                at_a_time=AT_A_TIME_MAX if self._supply.spread is None else 1,  # one for all
            )
            beside.finish()
        return self._staged(shards, live, base, checks), sum(shard.num_bytes for shard in shards)

    def _proof_of_base(
        self,
        manifest: Manifest,
        live: Mapping[str, TensorBuffer],
        base: Mapping[str, TensorEntry] | None,
        checks: Checks,
    ) -> Callable[[], None]:
        """Return the work of proving that a delta applies: the link has nothing to do with it."""
        aliases = self._engine.tensor_aliases()
        return partial(prove_base, manifest, live=live, aliases=aliases, base=base, checks=checks)

    def _room_for(
        self, whole: Manifest, base: Mapping[str, TensorEntry] | None
    ) -> Mapping[str, TensorBuffer]:
        """Return the tensors that a version is written to."""
        spare = self._spare
        if self._loras is not None:
            assert spare is not None  # noqa: S101 - an engine for LoRAs has one
            if self._loras.make_room(whole.lora, whole.tensors):
                spare.forget()
        return self._engine.live_tensors() if spare is None else spare.levelled(base)

    def _staged(
        self,
        shards: Sequence[FetchedShard],
        live: Mapping[str, TensorBuffer],
        base: Mapping[str, TensorEntry] | None,
        checks: Checks,
    ) -> StagedInstall:
        aliases = self._engine.tensor_aliases()
        if len(shards) > 1:
            return stage_shards(shards, live=live, aliases=aliases, base=base, checks=checks)
        return stage_install(
            shards[0].manifest,
            shards[0].objects,
            live=live,
            aliases=aliases,
            base=base,
            checks=checks,
        )

    def _fetcher(self, version: WeightVersion, keep_alive: Callable[[], None]) -> Fetcher:
        """Return what fetches one slot."""
        return Fetcher(
            self._reader,
            FetchParts(
                clock=self._clock,
                between_reads=keep_alive,
                on_record=self._transfers.append,
                limits=replace(self._limits.fetch, read_timeout_s=self._limits.read_timeout_s),
                trust=self._trust_in(version),
                spread=self._supply.spread,
                spool=self._spool,
            ),
        )

    def _spare_set(self) -> SpareSet | None:
        weights = spare_of(self._engine)
        if weights is None:
            return None
        return SpareSet(weights, live=self._engine.live_tensors, tools=self._tools)

    def _put_in(
        self,
        staged: StagedInstall,
        base: Mapping[str, TensorEntry] | None,
        label: InstalledVersion,
        checks: Checks,
    ) -> float:
        """Make a staged version what is served, and return how long no pass could start."""
        if self._spare is not None:
            _expect_root(self._spare.write(staged, whole=checks.whole), label)
            write = self._spare.exchange
        else:
            for each in staged.writes:
                warm_loops(each.dtype)
            write = self._writer(staged, base)
        pause_s = self._engine.at_safe_point(
            write, installed=label, timeout_s=self._limits.safe_point_timeout_s
        )
        if self._spare is None:
            self._prove(staged, label, checks)
        return pause_s

    def _writer(
        self, staged: StagedInstall, base: Mapping[str, TensorEntry] | None
    ) -> Callable[[], None]:
        """Return what is left to do at the safe point."""
        tensors = device_tensors_of(self._engine)
        if not tensors:
            return lambda: write_install(staged, tools=self._tools)
        from paceline.refit.staging.mirror import DeviceInstall, refresh_device

        if base is not None and not staged.has_parts:
            return DeviceInstall(staged, tensors, tools=self._tools).write

        def write() -> None:  # nothing is known of the device, or it has to be written in parts
            write_install(staged, tools=self._tools)
            refresh_device(tensors, self._engine.live_tensors())

        return write

    def _trust_in(self, version: WeightVersion) -> Trust | None:
        key = self._supply.verify_key
        return None if key is None else trust_in(version, key)

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
            check_live(self._engine.live_tensors(), staged.entries, only=only, tools=self._tools)
            if checks.whole:
                self._prove_device(staged.entries)
        except VerifyError as exc:
            raise UncertainStateError(
                f"live weights are not version {label.version_id}: {exc}"
            ) from exc
        if staged.root_digest != label.root_digest:
            raise UncertainStateError(
                f"live weights have root {staged.root_digest}, not {label.root_digest}"
            )

    def _prove_device(self, entries: Iterable[TensorEntry]) -> None:
        """Read what is on a device back, if there is any. Raises VerifyError."""
        tensors = device_tensors_of(self._engine)
        if tensors:
            from paceline.refit.staging.mirror import prove_device

            prove_device(tensors, entries)


def _expect_root(root: str, label: InstalledVersion) -> None:
    if root != label.root_digest:
        raise VerifyError(f"the weights written have root {root}, not {label.root_digest}")


def label_of(version: WeightVersion) -> InstalledVersion:
    """Return what an engine calls itself once it has the version. Raises VerifyError."""
    said = require_description(version)
    return InstalledVersion(
        version_id=version.uid, sequence=said.sequence, root_digest=said.root_digest
    )
