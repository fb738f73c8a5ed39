"""What a backend signs: eight methods, and small protocols for what only some can do."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.rental.model import (
    CredentialReport,
    DeathCause,
    ExitCode,
    InstanceHandle,
    InstanceStatus,
    Offer,
    OfferConstraints,
    SelfDestroyRecipe,
)
from paceline.rental.remote.protocol import Access


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
class SupportsAccess(Protocol):
    """A backend that says how its machines are reached, for terminals, tunnels and log readers."""

    def access(self, h: InstanceHandle) -> Access:
        """Return how a program of this computer gets to the machine; connects to nothing.

        Raises:
            InstanceNotFoundError: it does not exist any more.
            SshUnreachableError: it has no address yet.
        """
        ...


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that can say which machines it runs for us."""

    def list_instances(self, *, label_prefix: str = "") -> list[InstanceHandle]:
        """Return every machine of this account whose label starts with ``label_prefix``."""
        ...


@runtime_checkable
class SupportsListedSince(Protocol):
    """A backend that reads its listing while it waits for machines, and keeps the newest."""

    def listed_since(self, since_s: float) -> list[InstanceHandle] | None:
        """Return what ``list_instances`` would, from a listing asked for after ``since_s``.

        That is in monotonic seconds; None where there is no such listing yet. Costs no call.
        """
        ...


@runtime_checkable
class SupportsListingLag(Protocol):
    """A backend that knows how late its own listing may be."""

    listing_lag_s: float
    """After so many seconds from a create call, what is not listed was not created."""


@runtime_checkable
class SupportsSeenGone(Protocol):
    """A backend that reads after its order to destroy, and does not return before that says gone.

    It raises NotProvenGoneError where it cannot. Elsewhere whoever ends a machine reads itself.
    """

    sees_gone: bool


@runtime_checkable
class SupportsStop(Protocol):
    """A backend whose machines can be halted and started again with their disk."""

    def stop(self, h: InstanceHandle) -> None:
        """Halt the machine; ``status`` says ``stopped`` afterwards and its disk bills on.

        Idempotent. Ending a machine is ``teardown``; a stopped one is not gone.

        Raises:
            InstanceNotFoundError: it does not exist.
        """
        ...

    def start(self, h: InstanceHandle) -> None:
        """Start a stopped machine; returns before it runs. Idempotent.

        Its address may have changed, and the provider may have given its GPUs away.

        Raises:
            NoOffersError: no capacity where its disk is; it stays stopped.
            InstanceNotFoundError: it does not exist.
        """
        ...


@runtime_checkable
class SupportsSpot(Protocol):
    """A backend that also rents machines which it may take back at any moment."""

    def search_spot_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what is to be had as spot, as ``search_offers`` does; ``dph`` is today's price."""
        ...

    def provision_spot(
        self,
        offer_id: str,
        *,
        disk_gb: int,
        image: str,
        ssh_pubkey_path: Path,
        label: str,
        max_dph: float,
    ) -> InstanceHandle:
        """Create a spot machine, as ``provision`` does.

        ``max_dph`` is the most that it may cost, and the bid where the provider takes bids.
        One that was taken back reads ``stopped`` or ``destroyed``, whichever it is.
        """
        ...


@runtime_checkable
class SupportsPorts(Protocol):
    """A backend whose machines are behind somebody's address, with ports of that for theirs."""

    def with_ports(self, ports: Sequence[int]) -> BackendAdapter:
        """Return this backend such that what it creates has these TCP ports reached from outside.

        ``status`` of a machine that runs says where each is. Which number the world dials is the
        provider's choice, and changes when the machine is stopped and started.
        """
        ...


@runtime_checkable
class SupportsBalance(Protocol):
    """A backend that knows how much credit the account has left."""

    def balance_usd(self) -> float:
        """Return US dollars; negative is a debt. Reads only."""
        ...


@runtime_checkable
class SupportsActualCost(Protocol):
    """A backend that says what a machine has really cost."""

    def actual_cost_usd(self, h: InstanceHandle) -> float | None:
        """Return what has been billed for the machine so far, also after its end.

        None while the provider's books have no entry yet; they may be a day late.
        """
        ...


@runtime_checkable
class SupportsRelabel(Protocol):
    """A backend where a machine's label can be changed."""

    def relabel(self, h: InstanceHandle, label: str) -> InstanceHandle:
        """Change the label and return the handle that the machine has from now on.

        Raises:
            InstanceNotFoundError: it does not exist.
        """
        ...


@runtime_checkable
class SupportsSelfDestroy(Protocol):
    """A backend whose machines can end themselves when nobody is left to do it."""

    def self_destroy_recipe(self, h: InstanceHandle) -> SelfDestroyRecipe:
        """Return what to run on the machine to end it and its bill. Changes nothing."""
        ...


@runtime_checkable
class SupportsLogs(Protocol):
    """A backend that keeps what a machine printed while it started."""

    def logs(self, h: InstanceHandle, *, num_lines: int = 200) -> str:
        """Return the last lines of the machine's own log, which may be empty.

        Raises:
            InstanceNotFoundError: it does not exist, or its log went with it.
        """
        ...


@runtime_checkable
class SupportsCredentials(Protocol):
    """A backend that needs something to be let in, and can say whether that works."""

    def check(self) -> CredentialReport:
        """Look where credentials are found and try them with the cheapest read there is.

        Never raises for missing or refused credentials: the report says so, and what to do.
        Raises BackendError only where the answer cannot be known, such as without a network.
        """
        ...


@runtime_checkable
class SupportsDeathCause(Protocol):
    """A backend whose answers tell why a machine is not there any more."""

    def death_cause(self, status: InstanceStatus, *, is_spot: bool) -> DeathCause | None:
        """Return what ``status`` says about the end of a machine that ran; asks nobody.

        None: nothing that all backends' states do not say already.
        """
        ...


@runtime_checkable
class SupportsResidue(Protocol):
    """A backend where something can outlive a machine and go on billing."""

    def residue(self, h: InstanceHandle) -> list[str]:
        """Return what a machine that is gone has left: its disks, each by name. Reads only."""
        ...
