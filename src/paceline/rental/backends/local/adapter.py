"""Machines of this computer: a directory each, and the processes that were started in it.

On disk, under ``<state_dir>/local``::

    <instance_id>/machine.json      what was provisioned
    <instance_id>/workspace/        what relative remote paths are relative to
    <instance_id>/commands/         who runs now, one file per command
    .new-<instance_id>, .gone-*     half-way; swept by whoever comes next, under the lock
    .lock                           held while machines appear and disappear

A machine appears and disappears by one rename, so there is never half of one, and its name is
gone only after its last process is.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from paceline.rental import waiting
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.local import mapping
from paceline.rental.backends.local.mapping import MachineRecord
from paceline.rental.backends.registry import register_backend
from paceline.rental.errors import BackendError, InstanceNotFoundError, ProvisionError
from paceline.rental.model import (
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    Offer,
    OfferConstraints,
)
from paceline.rental.remote.durable import sync_directory, write_durably
from paceline.rental.remote.protocol import DirectoryTarget, ProcessRemote
from paceline.rental.remote.script import MACHINE_MARK

_GB = 1_000_000_000
_RECORD_BYTES_MAX = 65_536
_log = logging.getLogger("paceline.rental.local")


@register_backend(mapping.BACKEND)
class LocalBackend:
    """Machines of this computer, for nothing.

    There is one offer per CPU slot. Slots are not exclusive and nothing is limited to them:
    three roles fit on two cores and share them, as processes do.
    """

    name = mapping.BACKEND
    listing_lag_s = 0.0

    def __init__(self, *, parts: Parts | None = None) -> None:
        self._parts = parts or default_parts()
        self._home = self._parts.state_dir / "local"

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return the slots from which ``c`` can be met, in order of number."""
        return mapping.offers_of(
            c,
            num_cpus=self._parts.num_cpus,
            free_disk_gb=self._free_disk_gb(),
            ram_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _GB,
        )

    def provision(
        self, offer_id: str, *, disk_gb: int, image: str, ssh_pubkey_path: Path, label: str
    ) -> InstanceHandle:
        """Make a machine; image and key mean nothing here, and a label is used once."""
        num_slots = mapping.parse_offer_id(offer_id, num_cpus=self._parts.num_cpus)
        record = MachineRecord(
            instance_id=f"local-{self._parts.nonce()}",
            label=label,
            created_at=self._parts.clock.time(),
            num_slots=num_slots,
        )
        try:
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._refuse_small_disk(disk_gb)
            with self._locked():
                self._refuse_taken(label)
                self._create(record)
        except OSError as exc:
            raise ProvisionError(
                f"local: machine {label} was not created: {exc.strerror}; free some disk space "
                f"or mend the permissions of {self._home}"
            ) from exc
        return record.handle()

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Return at once, or raise: a machine that exists runs."""
        waiting.wait_running(
            lambda: self.status(h),
            clock=self._parts.clock,
            timeout_s=timeout_s,
            what=f"local machine {h.instance_id}",
        )

    def sync_to(
        self,
        h: InstanceHandle,
        src: Path,
        dst: str,
        *,
        excludes: Iterable[str] = (),
        includes: Iterable[str] = (),
        delete: bool = False,
    ) -> None:
        """Copy into the workspace."""
        self._remote(h).push(src, dst, includes=includes, excludes=excludes, delete=delete)

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        """Run a command in the workspace."""
        return self._remote(h).run(command, env=env, stream=stream, timeout_s=timeout_s)

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        """Copy out of the workspace."""
        self._remote(h).pull(src, dst, includes=includes, excludes=excludes)

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Read the machine's record from disk; ``raw`` says where its workspace is."""
        root = self._root(h)
        if root is None:
            return mapping.gone_status()
        record = _read_record(root)
        raw = {"workspace": str(root / "workspace"), "host": "127.0.0.1"}
        return mapping.status_of(record, now_s=self._parts.clock.time(), raw=raw)

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """End every process of the machine, with SIGKILL at once if ``force``; then remove it."""
        root = self._root(h)
        if root is None:
            _log.warning("local machine %s is gone already; nothing to tear down", h.instance_id)
            return
        try:
            self._remote(h).close(force=force)
            with self._locked():
                gone = self._home / f".gone-{h.instance_id}-{self._parts.nonce()}"
                # Another teardown may have been quicker; then there is nothing left to do.
                with contextlib.suppress(FileNotFoundError):
                    root.rename(gone)
                    _remove_tree(gone)
                self._sweep()
        except OSError as exc:
            raise BackendError(
                f"local machine {h.instance_id}: its directory cannot be removed: {exc}; mend "
                "that and tear down again"
            ) from exc

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return the machines on this disk, oldest first."""
        records = [record for root in self._roots() if (record := _read_record(root)) is not None]
        return [
            record.handle()
            for record in sorted(records, key=lambda record: record.created_at)
            if record.label.startswith(label_prefix)
        ]

    def _root(self, h: InstanceHandle) -> Path | None:
        """Return the machine's directory, or None if there is no such machine."""
        if not mapping.is_instance_id(h.instance_id):
            return None
        root = self._home / h.instance_id
        return root if root.is_dir() else None

    def _roots(self) -> list[Path]:
        if not self._home.is_dir():
            return []
        return [path for path in self._home.iterdir() if mapping.is_instance_id(path.name)]

    def access(self, h: InstanceHandle) -> DirectoryTarget:
        """Return which directory it is."""
        return DirectoryTarget(
            name=f"local machine {h.instance_id}",
            directory=self._must_root(h) / "workspace",
            environ={**self._environ(), MACHINE_MARK: h.instance_id},
        )

    def _remote(self, h: InstanceHandle) -> ProcessRemote:
        return self._parts.process_remote(self._must_root(h), h.instance_id, self._environ())

    def _must_root(self, h: InstanceHandle) -> Path:
        root = self._root(h)
        if root is None:
            raise InstanceNotFoundError(
                f"local machine {h.instance_id} does not exist any more; see `paceline ls`"
            )
        return root

    def _environ(self) -> Mapping[str, str]:
        return mapping.machine_environ(
            self._parts.environ,
            interpreter_dir=self._parts.interpreter_dir,
            working_dir=self._parts.working_dir,
        )

    def _refuse_small_disk(self, disk_gb: int) -> None:
        free_gb = self._free_disk_gb()
        if disk_gb > free_gb:
            raise ProvisionError(
                f"local has {free_gb:.1f} GB of free disk, {disk_gb} GB are asked for; free some "
                "or ask for less"
            )

    def _refuse_taken(self, label: str) -> None:
        for h in self.list_instances(label_prefix=label):
            if h.label == label:
                raise ProvisionError(
                    f"local: label {label!r} belongs to machine {h.instance_id} already; "
                    "tear that down or use another label"
                )

    def _create(self, record: MachineRecord) -> None:
        self._sweep()
        draft = self._home / f".new-{record.instance_id}"
        try:
            for name in ("workspace", "commands"):
                (draft / name).mkdir(parents=True, mode=0o700)
            write_durably(draft / "machine.json", mapping.render_record(record))
            draft.rename(self._home / record.instance_id)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # the sweep gets what resists
            raise
        sync_directory(self._home)

    def _sweep(self) -> None:
        """Remove what a killed process left half-way; call it under the lock.

        What resists is nobody's machine any more and keeps nobody from making one.
        """
        for pattern in (".new-*", ".gone-*"):
            for path in self._home.glob(pattern):
                try:
                    _remove_tree(path)
                except OSError as exc:
                    _log.warning("left-over %s cannot be removed: %s; remove it", path, exc)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from making or removing machines; ends with this process."""
        descriptor = os.open(self._home / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _free_disk_gb(self) -> float:
        path = self._home
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free / _GB


def _remove_tree(root: Path) -> None:
    """Remove a directory, with all that a role made unwritable or unreadable in it."""
    _open_up(root)
    for parent, names, _ in os.walk(root):
        for name in names:
            _open_up(Path(parent, name))
    shutil.rmtree(root)


def _open_up(directory: Path) -> None:
    """Let the owner in; a link is left alone, since it may lead out of the machine."""
    mode = directory.lstat().st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
        directory.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def _read_record(root: Path) -> MachineRecord | None:
    try:
        with (root / "machine.json").open("rb") as file:
            return mapping.parse_record(file.read(_RECORD_BYTES_MAX))
    except OSError:
        return None  # unreadable is unknown, as the contract has it
