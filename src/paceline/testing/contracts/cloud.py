"""What a backend of a paid provider must do when the provider, or the way to it, fails.

Subclass CloudContract beside BackendContract and say how the fake and the adapter are made. All
of it runs in one process on a clock that jumps, so it costs no time and no money.
"""

import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from paceline.core.address import split_address
from paceline.core.errors import DeadlineExceededError
from paceline.rental.backends.protocol import (
    BackendAdapter,
    SupportsActualCost,
    SupportsBalance,
    SupportsCredentials,
    SupportsListedSince,
    SupportsListing,
    SupportsLogs,
    SupportsPorts,
    SupportsRelabel,
    SupportsSelfDestroy,
    SupportsSpot,
    SupportsStop,
)
from paceline.rental.errors import (
    AuthError,
    BackendError,
    BootFailedError,
    InstanceNotFoundError,
    MissingKeyError,
    NoOffersError,
    NotProvenGoneError,
    ProvisionError,
    RateLimitError,
    SshUnreachableError,
)
from paceline.rental.model import InstanceHandle, InstanceState, OfferConstraints
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.cloud import FakeCloud

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0 contract test"


class CloudContract(ABC):
    """The claims, tested against one adapter and its provider's fake."""

    gpu_target = "h100-1x"
    image = "ubuntu:24.04"
    disk_gb = 50

    @abstractmethod
    def make_fake(self, clock: FakeClock) -> FakeCloud:
        """Return the provider, with something on offer for ``gpu_target``."""

    @abstractmethod
    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        """Return an adapter that finds its key in ``environ`` and calls ``fake``."""

    @abstractmethod
    def environ_of(self, key: str) -> dict[str, str]:
        """Return the environment in which the adapter finds ``key``."""

    @pytest.fixture(autouse=True)
    def _world(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.fake = self.make_fake(self.clock)
        self.environ = {"HOME": str(tmp_path / "home"), **self.environ_of(self.fake.key)}
        self.key_path = tmp_path / "key.pub"
        self.key_path.write_text(PUBLIC_KEY + "\n")
        self.state_dir = tmp_path / "state"
        self.adapter = self.make_adapter(self.fake, environ=self.environ, state_dir=self.state_dir)

    def offer_id(self) -> str:
        """Return the cheapest offer."""
        return self.adapter.search_offers(self.constraints())[0].id

    def constraints(self) -> OfferConstraints:
        """Return constraints that something meets."""
        return OfferConstraints(self.gpu_target, min_disk_gb=self.disk_gb)

    def provision(
        self,
        offer_id: str | None = None,
        label: str | None = None,
        adapter: BackendAdapter | None = None,
    ) -> InstanceHandle:
        """Rent the cheapest machine."""
        return (adapter or self.adapter).provision(
            offer_id or self.offer_id(),
            disk_gb=self.disk_gb,
            image=self.image,
            ssh_pubkey_path=self.key_path,
            label=label or f"paceline-contract-{uuid.uuid4().hex[:8]}",
        )

    def labels_billing(self) -> list[str]:
        """Return the labels of what costs money now, by the provider's own books."""
        return [rental.label for rental in self.fake.billing()]

    def test_a_machine_lives_and_ends_and_the_bill_stops(self) -> None:
        """From search to teardown one machine is on the provider's books, and none afterwards."""
        h = self.provision(label="paceline-r1-rollout-0-ab12")
        assert self.labels_billing() == [h.label]
        assert self.adapter.status(h).state == InstanceState.LOADING
        self.adapter.wait_running(h, timeout_s=1200)
        status = self.adapter.status(h)
        assert status.state == InstanceState.RUNNING
        assert (status.public_endpoint or "").startswith("ssh://")
        assert status.num_gpus == 1
        assert self.adapter.run_remote(h, "true").code == 0
        self.adapter.teardown(h)
        assert self.labels_billing() == []
        assert self.adapter.status(h).state == InstanceState.DESTROYED

    def test_the_pace_of_the_provider_is_kept(self) -> None:
        """No call comes sooner than the provider allows, whatever the caller does."""
        self.fake.enforces_pace = True
        for _ in range(3):
            h = self.provision()
            self.adapter.wait_running(h, timeout_s=1200)
            self.adapter.status(h)
            self.adapter.teardown(h)
        assert self.fake.num_rate_limited == 0

    def test_offers_name_prices_that_the_bill_confirms(self) -> None:
        """What an offer costs is what the machine costs."""
        offer = self.adapter.search_offers(self.constraints())[0]
        self.provision(offer.id)
        (rental,) = self.fake.billing()
        assert rental.dph == pytest.approx(offer.dph, rel=0.02)

    @pytest.mark.parametrize("target", ["nosuchgpu-1x", "a100-1x", "H100", "h100-1000x"])
    def test_what_the_provider_cannot_have_is_no_offer(self, target: str) -> None:
        """Unknown, ambiguous and too wide targets are NoOffersError with a reason."""
        with pytest.raises(NoOffersError, match=self.adapter.name):
            self.adapter.search_offers(OfferConstraints(target, min_disk_gb=1))

    def test_a_race_lost_at_create_is_a_provision_error(self) -> None:
        """Sold out at the last moment: nothing bills, and another offer may be tried."""
        offer_id = self.offer_id()
        self.fake.faults.arm("no-capacity")
        with pytest.raises(ProvisionError) as caught:
            self.provision(offer_id)
        assert caught.value.leaked is None
        assert not caught.value.is_backend_wide
        assert self.labels_billing() == []

    def test_an_empty_account_ends_the_attempts(self) -> None:
        """No other offer will do better without money, and the error says so."""
        offer_id = self.offer_id()
        self.fake.faults.arm("no-balance")
        with pytest.raises(ProvisionError, match=r"credit|balance|quota") as caught:
            self.provision(offer_id)
        assert caught.value.is_backend_wide

    @pytest.mark.parametrize("fault", ["error-but-created", "lost-answer", "html", "half-body"])
    def test_an_ambiguous_create_is_looked_up_and_not_repeated(self, fault: str) -> None:
        """Whatever hides the answer: one machine, found by its label."""
        offer_id = self.offer_id()
        self.fake.create_faults.append(fault)
        h = self.provision(offer_id, label="paceline-lost-1")
        assert self.labels_billing() == ["paceline-lost-1"]
        assert h.label == "paceline-lost-1"
        self.adapter.teardown(h)
        assert self.labels_billing() == []

    def test_a_late_listing_is_waited_for(self) -> None:
        """A machine that shows up some seconds after its lost create is still found."""
        offer_id = self.offer_id()
        self.fake.faults.arm("error-but-created")
        self.fake.faults.arm("late-listing")
        h = self.provision(offer_id, label="paceline-late-1")
        assert self.labels_billing() == [h.label]

    def test_an_ambiguous_create_that_made_nothing_is_no_provision_error(self) -> None:
        """Not found is no proof, so it is neither a refusal nor a machine."""
        offer_id = self.offer_id()
        self.fake.create_faults.append("server-error")
        with pytest.raises(BackendError) as caught:
            self.provision(offer_id)
        assert not isinstance(caught.value, ProvisionError | NoOffersError)
        assert self.labels_billing() == []

    def test_a_create_is_sent_once(self) -> None:
        """However it fails, the provider sees one create call."""
        offer_id = self.offer_id()
        for fault in ("server-error", "lost-request", "rate-limit"):
            before = self.num_creates()
            self.fake.create_faults.append(fault)
            with pytest.raises(BackendError):
                self.provision(offer_id)
            assert self.num_creates() == before + 1

    def num_creates(self) -> int:
        """Return how many create calls the provider has seen."""
        return self.fake.num_creates

    @pytest.mark.parametrize("fault", ["rate-limit", "server-error", "lost-answer", "html"])
    def test_reads_are_repeated_through_short_trouble(self, fault: str) -> None:
        """Two failures in a row do not show."""
        h = self.provision()
        self.fake.faults.arm(fault, times=2)
        assert self.adapter.status(h).state == InstanceState.LOADING
        self.fake.faults.arm(fault, times=2)
        assert self.adapter.search_offers(self.constraints())

    @pytest.mark.parametrize(
        "fault", ["rate-limit", "server-error", "lost-request", "html", "half-body", "slow-body"]
    )
    def test_long_trouble_is_a_typed_error_in_bounded_time(self, fault: str) -> None:
        """A provider that stays away is a BackendError that names it, within minutes."""
        h = self.provision()
        self.fake.faults.set_chance(fault, 1.0)
        began_s = self.clock.monotonic()
        with pytest.raises(BackendError, match=self.adapter.name) as caught:
            self.adapter.status(h)
        assert not isinstance(caught.value, InstanceNotFoundError)
        assert self.clock.monotonic() - began_s <= 200
        if fault == "rate-limit":
            assert isinstance(caught.value, RateLimitError)

    def test_a_wrong_key_is_an_auth_error_and_nothing_is_gone(self) -> None:
        """A refused key says nothing about a machine, and the next step is in the message."""
        h = self.provision()
        self.fake.key = "another"
        for call in (
            lambda: self.adapter.status(h),
            lambda: self.adapter.teardown(h),
            lambda: self.adapter.run_remote(h, "true"),
        ):
            with pytest.raises(AuthError, match="paceline check"):
                call()
        assert self.labels_billing() == [h.label]

    def test_a_wrong_key_at_create_ends_the_attempts(self) -> None:
        """With a refused key no offer can be had: the backend is passed over as a whole."""
        offer_id = self.offer_id()
        self.fake.key = "another"
        with pytest.raises(ProvisionError) as caught:
            self.provision(offer_id)
        assert caught.value.is_backend_wide

    def test_without_a_key_nothing_is_sent(self) -> None:
        """A user of other backends is not made to wait for a provider that he does not use."""
        h = self.provision()
        for name in self.environ_of("x"):
            self.environ.pop(name, None)
        num_calls = len(self.fake.calls)
        with pytest.raises(MissingKeyError, match="paceline check"):
            self.adapter.status(h)
        assert len(self.fake.calls) == num_calls

    def test_a_changed_key_is_used_at_once(self) -> None:
        """An adapter that lives for days follows a rotation without a restart."""
        h = self.provision()
        self.fake.key = "rotated-key"
        self.environ.update(self.environ_of("rotated-key"))
        assert self.adapter.status(h).state == InstanceState.LOADING

    def test_no_error_and_no_repr_holds_the_key(self, caplog: pytest.LogCaptureFixture) -> None:
        """Whatever fails, the key is in no message, note, log line or repr."""
        secret = "sekrit-7d1f0c"  # noqa: S105 - planted, to be looked for
        self.fake.key = secret
        self.environ.update(self.environ_of(secret))
        h = self.provision()
        texts = [repr(self.adapter), repr(vars(self.adapter))]
        with caplog.at_level(logging.DEBUG):
            for fault in ("rate-limit", "server-error", "lost-request", "html", "slow-body"):
                self.fake.faults.set_chance(fault, 1.0)
                for call in (lambda: self.adapter.status(h), lambda: self.provision("1")):
                    try:
                        call()
                    except BackendError as exc:
                        texts += [repr(exc), str(exc), *getattr(exc, "__notes__", ())]
                self.fake.faults.calm()
        assert secret not in json.dumps([*texts, caplog.text])

    def test_a_missing_ssh_key_is_said_before_anything_is_created(self) -> None:
        """No file, or a private one: refused, with nothing sent."""
        offer_id = self.offer_id()
        for text in (None, "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"):
            self.key_path.unlink(missing_ok=True)
            if text is not None:
                self.key_path.write_text(text)
            with pytest.raises(ProvisionError, match=str(self.key_path)):
                self.provision(offer_id)
        assert self.num_creates() == 0

    def test_a_booting_machine_is_unreachable_and_not_broken(self) -> None:
        """Inside the boot window commands and copies are SshUnreachableError."""
        h = self.provision()
        with pytest.raises(SshUnreachableError):
            self.adapter.run_remote(h, "true")
        with pytest.raises(SshUnreachableError):
            self.adapter.sync_to(h, self.key_path, "x")

    def test_a_boot_that_never_ends_meets_its_deadline(self) -> None:
        """wait_running returns by its deadline on the injected clock."""
        offer_id = self.offer_id()
        self.fake.faults.arm("never-boots")
        h = self.provision(offer_id)
        began_s = self.clock.monotonic()
        with pytest.raises(DeadlineExceededError, match=h.instance_id):
            self.adapter.wait_running(h, timeout_s=300)
        assert 300 <= self.clock.monotonic() - began_s < 450

    def test_a_boot_that_failed_says_so_at_once(self) -> None:
        """Where the provider lets it show, nobody waits for the deadline."""
        offer_id = self.offer_id()
        self.fake.faults.arm("boot-fails")
        h = self.provision(offer_id)
        with pytest.raises((BootFailedError, InstanceNotFoundError)):
            self.adapter.wait_running(h, timeout_s=3600)
        assert self.clock.monotonic() < 1800

    def test_an_ignored_destroy_is_not_believed(self) -> None:
        """A destroy that was answered and not done is NotProvenGoneError, and can be repeated."""
        h = self.provision()
        self.clock.advance(120)
        self.fake.faults.set_chance("ignored-destroy", 1.0)
        with pytest.raises(NotProvenGoneError, match=h.instance_id):
            self.adapter.teardown(h)
        assert self.labels_billing() == [h.label]
        self.fake.faults.calm()
        self.adapter.teardown(h)
        assert self.labels_billing() == []

    def test_an_interrupted_teardown_can_be_repeated(self) -> None:
        """A lost answer to a destroy is no reason to stop, nor to raise."""
        h = self.provision()
        self.clock.advance(120)
        self.fake.faults.arm("lost-answer")
        self.adapter.teardown(h)
        assert self.labels_billing() == []

    def test_a_jump_of_our_clock_loses_nothing(self) -> None:
        """With the wall clock hours off, a machine is still there, and still goes when told."""
        h = self.provision()
        self.clock.set_time(self.clock.time() - 7200)
        assert self.adapter.status(h).state == InstanceState.LOADING
        self.adapter.teardown(h)
        assert self.adapter.status(h).state == InstanceState.DESTROYED
        assert self.labels_billing() == []

    def test_many_machines_are_listed_to_the_last(self) -> None:
        """Paging does not lose one, and the prefix decides."""
        listing = self.adapter
        assert isinstance(listing, SupportsListing)
        made = {self.fake.plant(label=f"paceline-many-{i}") for i in range(57)}
        self.fake.plant(label="someone-else")
        found = listing.list_instances(label_prefix="paceline-many-")
        assert {h.instance_id for h in found} == made
        assert len(found) == len(made)
        assert len(listing.list_instances()) == len(made) + 1

    def test_a_listing_is_handed_on_to_whoever_asked_before_it(self) -> None:
        """It counts from when it was asked for, and costs no call to hand on."""
        if not isinstance(self.adapter, SupportsListedSince):
            pytest.skip("keeps no listing")
        assert isinstance(self.adapter, SupportsListing)
        before_s = self.clock.monotonic()
        assert self.adapter.listed_since(before_s) is None
        h = self.provision()
        self.clock.sleep(1.0)
        self.adapter.list_instances()
        num_calls = len(self.fake.calls)
        listed = self.adapter.listed_since(before_s) or []
        assert [one.instance_id for one in listed] == [h.instance_id]
        self.clock.sleep(1.0)
        assert self.adapter.listed_since(self.clock.monotonic()) is None
        assert len(self.fake.calls) == num_calls

    def test_stop_and_start_where_there_is_such_a_thing(self) -> None:
        """A stopped machine reads stopped, bills on, and runs again after a start."""
        if not isinstance(self.adapter, SupportsStop):
            pytest.skip("cannot stop machines")
        h = self.provision()
        self.adapter.wait_running(h)
        self.adapter.stop(h)
        self.settle(lambda: self.adapter.status(h).state == InstanceState.STOPPED)
        assert self.labels_billing() == [h.label]
        self.adapter.stop(h)
        self.adapter.start(h)
        self.adapter.wait_running(h)
        self.adapter.teardown(h)
        with pytest.raises(InstanceNotFoundError):
            self.adapter.stop(h)

    def test_ports_that_were_asked_for_are_reached_from_outside(self) -> None:
        """What was asked for is in the status of a machine that runs, and nothing that was not."""
        if not isinstance(self.adapter, SupportsPorts):
            pytest.skip("every port of a machine has its own number")
        plain = self.provision(label="paceline-plain-1")
        self.adapter.wait_running(plain)
        assert dict(self.adapter.status(plain).ports) == {}
        wider = self.adapter.with_ports((20_005, 20_006))
        h = self.provision(label="paceline-wide-1", adapter=wider)
        self.adapter.wait_running(h)
        ports = self.adapter.status(h).ports
        assert sorted(ports) == [20_005, 20_006]
        assert len({*ports.values()}) == len(ports)
        for place in ports.values():
            host, port = split_address(place)
            assert host
            assert port > 0

    def test_a_changed_label_is_the_one_that_is_listed(self) -> None:
        """Listing by the new label finds the machine, by the old one it does not."""
        if not isinstance(self.adapter, SupportsRelabel):
            pytest.skip("cannot change labels")
        assert isinstance(self.adapter, SupportsListing)
        h = self.provision(label="paceline-old-1")
        renamed = self.adapter.relabel(h, "paceline-new-1")
        assert (renamed.instance_id, renamed.label) == (h.instance_id, "paceline-new-1")
        assert self.adapter.list_instances(label_prefix="paceline-old") == []
        assert self.adapter.list_instances(label_prefix="paceline-new")[0] == renamed

    def test_spot_machines_are_found_rented_and_ended(self) -> None:
        """Where there is spot, it is no dearer than on demand and ends like any machine."""
        if not isinstance(self.adapter, SupportsSpot):
            pytest.skip("has no spot machines")
        offer = self.adapter.search_spot_offers(self.constraints())[0]
        assert offer.dph <= self.adapter.search_offers(self.constraints())[0].dph
        h = self.adapter.provision_spot(
            offer.id,
            disk_gb=self.disk_gb,
            image=self.image,
            ssh_pubkey_path=self.key_path,
            label="paceline-spot-1",
            max_dph=offer.dph * 1.5,
        )
        self.adapter.wait_running(h)
        self.adapter.teardown(h)
        assert self.labels_billing() == []

    def test_the_money_that_the_provider_tells(self) -> None:
        """Balance and actual cost come from the provider's books, where it opens them."""
        h = self.provision()
        self.clock.advance(7200)
        if isinstance(self.adapter, SupportsBalance):
            assert self.adapter.balance_usd() == pytest.approx(self.fake.balance_usd)
        if isinstance(self.adapter, SupportsActualCost):
            assert self.adapter.actual_cost_usd(h) == pytest.approx(self.fake.bill_usd(), rel=0.01)

    def test_the_way_to_end_itself_holds_no_account_key(self) -> None:
        """The dead-man switch on a machine never has the key of the whole account."""
        h = self.provision()
        if not isinstance(self.adapter, SupportsSelfDestroy):
            pytest.skip("machines cannot end themselves")
        recipe = self.adapter.self_destroy_recipe(h)
        assert recipe.command
        assert recipe.guarantee
        assert self.fake.key not in recipe.command + json.dumps(dict(recipe.env))

    def test_logs_where_the_provider_has_them(self) -> None:
        """The last lines of the machine's log, and no more than asked for."""
        if not isinstance(self.adapter, SupportsLogs):
            pytest.skip("has no logs")
        h = self.provision()
        self.adapter.wait_running(h)
        assert self.adapter.logs(h)
        assert len(self.adapter.logs(h, num_lines=1).splitlines()) == 1

    def test_check_says_where_the_key_is_and_whether_it_works(self) -> None:
        """Found and good, found and refused, not found: each with what to do."""
        assert isinstance(self.adapter, SupportsCredentials)
        report = self.adapter.check()
        assert report.is_valid
        assert report.found_in
        assert report.advice == ""
        self.fake.key = "another"
        refused = self.adapter.check()
        assert not refused.is_valid
        assert refused.found_in == report.found_in
        assert refused.advice
        for name in self.environ_of("x"):
            self.environ.pop(name, None)
        missing = self.adapter.check()
        assert missing == type(missing)(found_in=None, is_valid=False, advice=missing.advice)
        assert missing.advice

    def settle(self, is_so: Callable[[], bool]) -> None:
        """Let time pass until something that takes a while is so."""
        for _ in range(100):
            if is_so():
                return
            self.clock.advance(5)
        pytest.fail("did not become so")
