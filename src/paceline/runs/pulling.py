"""Bring checkpoints off the machines while a run lasts, and back to a machine that starts again.

On a schedule each machine is asked what it has. What is new comes here, the newest first, or, when
the job names an object store, goes there straight from the machine. A role that starts again finds
the newest under ``PACELINE_RESUME_FROM``.
"""

import shlex
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread

from paceline.core.clock import Clock
from paceline.core.errors import PreflightError
from paceline.rental import BackendAdapter, InstanceHandle, RemoteCommandError
from paceline.runs.bootstrap import Guest
from paceline.runs.checkpoints import (
    LISTING_BYTES_MAX,
    Checkpoint,
    listing_command,
    parse_listing,
    plan_fetches,
    roots_of,
)
from paceline.runs.fleet import Fleet
from paceline.runs.journal import Journal
from paceline.runs.model import ArtifactSpec, Slot
from paceline.runs.shelf import MANIFEST, Shelf

LIST_TIMEOUT_S = 120
LINK_TIMEOUT_S = 30
STORE_TIMEOUT_S = 3600
CHECKPOINTS = "checkpoints"
"""Folder of a run's output for checkpoints pulled while it lasted."""
RESUME = "resume"
"""Folder of a run on a machine for what a role goes on from."""
OUR_COMMAND = "p=paceline; command -v paceline >/dev/null 2>&1 || p='python3 -m paceline'; $p"
"""How paceline is called on a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullParts:
    """What checkpoints are brought with."""

    run_id: str
    artifacts: ArtifactSpec
    out: Path
    clock: Clock
    journal: Journal
    is_adopted: bool = False
    """Another driver began the roles."""
    store_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Credentials for the object store, for commands on machines."""


class Puller:
    """Brings the checkpoints of all slots; ``poll`` and ``pull_now`` belong to the driver."""

    def __init__(self, parts: PullParts) -> None:
        self._parts = parts
        self._roots = roots_of(parts.artifacts.pull)
        self._fleet: Fleet | None = None
        self._due_s: float | None = None
        self._pulls: list[Thread] = []
        self._lock = Lock()
        self._told: dict[str, str] = {}
        self._started_on: dict[Slot, str] = {}

    def use(self, fleet: Fleet) -> None:
        """Take the machines; they know this puller already."""
        self._fleet = fleet

    @property
    def told(self) -> Mapping[str, str]:
        """Return the newest checkpoint of each slot, by the slot's name."""
        with self._lock:
            return dict(self._told)

    def poll(self, now_s: float, running: Collection[Slot]) -> None:
        """Begin to pull from the slots that run when it is due and no pull is under way."""
        every_s = self._parts.artifacts.every_s
        if every_s is None:
            return
        if self._due_s is None:
            self._due_s = now_s + every_s
        if now_s >= self._due_s and not any(pull.is_alive() for pull in self._pulls):
            self._due_s = now_s + every_s
            self._pulls = self.pull_now(running)

    def pull_now(self, slots: Collection[Slot]) -> list[Thread]:
        """Begin to pull from these machines; the threads are alive while they copy."""
        fleet = self._fleet
        if fleet is None:
            return []
        work = self.pull if self._parts.artifacts.to is None else self.store
        return [fleet.errand(slot, work) for slot in fleet.machines if slot in slots]

    def pull(self, slot: Slot, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> None:
        """Bring what is new on one machine here."""
        self._pull_log(backend, handle, g)
        shelf, keep = self._shelf(slot), self._parts.artifacts.keep
        found = self._list(backend, handle, g)
        for one in plan_fetches(found, kept=list(shelf.kept().values()), keep=keep):

            def copy(into: Path, one: Checkpoint = one) -> None:
                _copy(backend, handle, g.path(one.source), into, one)

            def is_still(one: Checkpoint = one) -> bool:
                return one in self._list(backend, handle, g)

            if shelf.fetch(one, copy, is_still=is_still) is not None:
                self._tell(slot, "checkpoint.pulled", one)
                shelf.prune(keep=keep)

    def store(self, slot: Slot, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> None:
        """Have one machine send what is new to the object store."""
        self._pull_log(backend, handle, g)
        artifacts = self._parts.artifacts
        words = ["checkpoints", "push", f"{artifacts.to}", "--run", self._parts.run_id]
        words += ["--slot", str(slot), "--keep", str(artifacts.keep)]
        self._store_command(backend, handle, [*words, *self._roots])
        self._tell(slot, "checkpoint.stored", None)

    def prepare(
        self, slot: Slot, backend: BackendAdapter, handle: InstanceHandle, g: Guest
    ) -> None:
        """Give a role that starts again what it had; does nothing at its first start."""
        before = self._started_on.get(slot)
        self._started_on[slot] = handle.label
        if before is None and not self._parts.is_adopted:
            return
        begun = backend.run_remote(handle, g.has_started, stream=False, timeout_s=LINK_TIMEOUT_S)
        if begun.code == 0:
            self._link(backend, handle, g)
            return
        self._put_log_aside(slot)
        if self._parts.artifacts.to is not None:
            words = ["checkpoints", "fetch", self._parts.artifacts.to, "--run"]
            words += [self._parts.run_id, "--slot", str(slot), "--into", g.path(RESUME)]
            self._store_command(backend, handle, words)
        else:
            for where, folder in self._shelf(slot).newest().items():
                there = "/".join(filter(None, (g.path(RESUME), where)))
                backend.sync_to(handle, folder, there, excludes=(f"/{MANIFEST}",))

    def _put_log_aside(self, slot: Slot) -> None:
        """Keep what the machine before said: the next one begins a log of the same name."""
        logs = self._parts.out / "logs"
        log = logs / f"{slot}.log"
        if log.exists():
            log.rename(logs / f"{slot}.{1 + len(list(logs.glob(f'{slot}.*.log')))}.log")

    def _link(self, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> None:
        """Show a role on the same machine its own files where it looks for them."""
        lines = [f"cd {g.run_id} && rm -rf {RESUME} && mkdir {RESUME}"]
        for root in self._roots:
            where = root.removeprefix("work").removeprefix("out").strip("/")
            there = shlex.quote(f"{RESUME}/{where}" if where else RESUME)
            source = shlex.quote(root)
            lines.append(
                f'if [ -d {source} ]; then mkdir -p {there}; ln -s "$PWD"/{source}/* {there}/; '
                f"elif [ -e {source} ]; then mkdir -p $(dirname {there}); "
                f'ln -s "$PWD"/{source} {there}; fi'
            )
        command = "; ".join(lines)
        backend.run_remote(handle, command, stream=False, timeout_s=LINK_TIMEOUT_S)

    def _store_command(
        self, backend: BackendAdapter, handle: InstanceHandle, words: list[str]
    ) -> None:
        command = f"{OUR_COMMAND} {shlex.join(words)}"
        ended = backend.run_remote(
            handle,
            f"{{ {command}; }} > {self._parts.run_id}/logs/checkpoints.log 2>&1",
            env=self._parts.store_env,
            stream=False,
            timeout_s=STORE_TIMEOUT_S,
        )
        if ended.code != 0:
            raise RemoteCommandError(
                f"checkpoints on {handle.label}: `paceline {' '.join(words[:2])}` ended with "
                f"{ended.code}; logs/checkpoints.log there says why"
            )

    def _pull_log(self, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> None:
        logs = self._parts.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        backend.sync_from(handle, g.path("logs"), logs)

    def _list(self, backend: BackendAdapter, handle: InstanceHandle, g: Guest) -> list[Checkpoint]:
        """Ask a machine which checkpoints it has."""
        into = f"state/checkpoints-{g.slot}.txt"
        command = listing_command(g.run_id, self._roots, into=into)
        ended = backend.run_remote(handle, command, stream=False, timeout_s=LIST_TIMEOUT_S)
        if ended.code != 0:
            raise RemoteCommandError(
                f"listing checkpoints on {handle.label} ended with {ended.code}"
            )
        with tempfile.TemporaryDirectory() as folder:
            listing = Path(folder) / "listing"
            backend.sync_from(handle, g.path(into), listing)
            if listing.stat().st_size > LISTING_BYTES_MAX:
                raise PreflightError("too many files; name narrower paths under artifacts.pull")
            text = listing.read_text(encoding="utf-8", errors="surrogateescape")
        return parse_listing(text, roots=self._roots)

    def _shelf(self, slot: Slot) -> Shelf:
        return Shelf(self._parts.out / CHECKPOINTS / str(slot))

    def _tell(self, slot: Slot, name: str, one: Checkpoint | None) -> None:
        told: dict[str, object] = {"role": slot.role, "index": slot.index}
        if one is not None:
            told |= {"path": f"{one.root}/{one.commit_name}", "num_bytes": one.num_bytes}
            with self._lock:
                before = self._told.get(str(slot), "")
                self._told[str(slot)] = max(before, one.commit_name)
        self._parts.journal.record(name, told)


def _copy(
    backend: BackendAdapter, handle: InstanceHandle, there: str, into: Path, one: Checkpoint
) -> None:
    """Copy one checkpoint's files; of a path's loose files only those that were listed."""
    if not one.is_loose:
        backend.sync_from(handle, there, into)
        return
    names = [f"/{_literal(file.path)}" for file in one.files]
    backend.sync_from(handle, there, into, includes=names, excludes=("*",))


def _literal(name: str) -> str:
    """Return a file's name as a pattern of rsync that fits nothing else."""
    return (
        "".join(f"\\{c}" if c in "*?[\\" else c for c in name) if set(name) & set("*?[") else name
    )
