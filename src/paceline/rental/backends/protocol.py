"""What a backend signs: eight methods, and small protocols for what only some can do."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.rental.model import (
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    Offer,
    OfferConstraints,
)


@runtime_checkable
class BackendAdapter(Protocol):
    """Machines of one provider.

    An implementation is built with no arguments and without network I/O. All failures are
    BackendError or a subclass. A caller must not assume that two calls see the same state of
    the provider, nor that a create which raised created nothing.
    """

    name: str

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return all offers that fit ``c``, cheapest first. Reads only.

        Raises:
            NoOffersError: nothing fits.
        """
        ...

    def provision(
        self,
        offer_id: str,
        *,
        disk_gb: int,
        image: str,
        ssh_pubkey_path: Path,
        label: str,
    ) -> InstanceHandle:
        """Create one machine from an offer and return its handle; from then on it bills.

        Not idempotent and never repeated blindly: after a failure look for ``label`` first.

        Raises:
            ProvisionError: nothing was created, or ``leaked`` names what was.
        """
        ...

    def wait_running(self, h: InstanceHandle, *, timeout_s: int = 1200) -> None:
        """Block until ``status(h).state`` is ``running``; bounded by ``timeout_s``.

        Raises:
            DeadlineExceededError: still not running.
            InstanceNotFoundError: it went away.
        """
        ...

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
        """Copy the local ``src`` to ``dst`` on the machine, as rsync does.

        Patterns are rsync's; an include wins over an exclude. With ``delete``, what is not in
        ``src`` is removed from ``dst``, excluded paths apart. Safe to repeat.
        """
        ...

    def run_remote(
        self,
        h: InstanceHandle,
        command: str,
        *,
        env: Mapping[str, str] = {},
        stream: bool = True,
        timeout_s: int | None = None,
    ) -> ExitCode:
        """Run a shell command on the machine, wait, and return its own exit status.

        ``stream`` passes its output through while it runs. After ``timeout_s`` the whole
        process group is ended. ``env`` never shows up in an argument list.

        Raises:
            SshUnreachableError: the command was not started.
            CommandTimeoutError: it was ended by the timeout.
        """
        ...

    def sync_from(
        self,
        h: InstanceHandle,
        src: str,
        dst: Path,
        *,
        includes: Iterable[str] = (),
        excludes: Iterable[str] = (),
    ) -> None:
        """Copy ``src`` on the machine to the local ``dst``; never deletes. Safe to repeat."""
        ...

    def status(self, h: InstanceHandle) -> InstanceStatus:
        """Ask once. A state nobody knows is ``unknown``; one that is gone is ``destroyed``."""
        ...

    def teardown(self, h: InstanceHandle, *, force: bool = False) -> None:
        """Destroy the machine and everything on it. Idempotent: one that is gone is a warning."""
        ...


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that can say which machines it runs for us."""

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine of this account whose label starts with ``label_prefix``."""
        ...


@runtime_checkable
class SupportsListingLag(Protocol):
    """A backend that knows how late its own listing may be."""

    listing_lag_s: float
    """After so many seconds from a create call, what is not listed was not created."""
