"""What every backend must do; subclass BackendContract and say how yours is made.

The claims are those of the eight methods. A machine is rented for each test that needs one, so
against a paid provider this costs money: there, run it on purpose.
"""

import logging
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.backends.protocol import BackendAdapter, SupportsListing
from paceline.rental.errors import (
    CommandTimeoutError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
)
from paceline.rental.model import InstanceHandle, InstanceState
from paceline.testing.contracts.machine import CopyContract

_SECRET = "hunter2-7f3a9c"  # noqa: S105 - planted, to be looked for


class BackendContract(CopyContract):
    """The claims of the backend port, tested against one implementation."""

    newborn_s = 0.0
    """For so long the provider may not know a machine; who did not end it takes it to be there."""

    def test_signs_the_contract(self, adapter: BackendAdapter) -> None:
        """An adapter has the eight methods and a name."""
        assert isinstance(adapter, BackendAdapter)
        assert adapter.name

    def test_offers_come_cheapest_first_and_fit(self, adapter: BackendAdapter) -> None:
        """Offers are sorted by price and name their backend."""
        offers = adapter.search_offers(self.constraints())
        assert offers
        assert [offer.dph for offer in offers] == sorted(offer.dph for offer in offers)
        assert {offer.backend for offer in offers} == {adapter.name}
        assert len({offer.id for offer in offers}) == len(offers)
        assert all(offer.disk_space_gb >= self.disk_gb for offer in offers)

    def test_no_offer_is_an_error_of_its_own(self, adapter: BackendAdapter) -> None:
        """Where nothing fits, search raises NoOffersError and does not return an empty list."""
        with pytest.raises(NoOffersError):
            adapter.search_offers(self.constraints(max_dph=-1.0))

    def test_an_offer_that_never_was_creates_nothing(
        self, adapter: BackendAdapter, tmp_path: Path
    ) -> None:
        """Provisioning from an unknown offer raises ProvisionError without a leaked handle."""
        with pytest.raises(ProvisionError) as caught:
            adapter.provision(
                "no-such-offer",
                disk_gb=self.disk_gb,
                image=self.image,
                ssh_pubkey_path=tmp_path / "key.pub",
                label="paceline-contract-none",
            )
        assert caught.value.leaked is None

    def test_a_machine_runs_and_others_see_it(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """After wait_running a second adapter reads running, and lists it under its label."""
        other = self.make()
        status = other.status(h)
        assert status.state == InstanceState.RUNNING
        assert status.uptime_s is None or status.uptime_s >= 0
        if isinstance(other, SupportsListing):
            assert [found.instance_id for found in other.list_instances(label_prefix=h.label)] == [
                h.instance_id
            ]
            assert other.list_instances(label_prefix=h.label + "x") == []

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_the_exit_code_is_the_commands_own(
        self, adapter: BackendAdapter, h: InstanceHandle, code: int
    ) -> None:
        """Whatever a command exits with is what comes back."""
        result = adapter.run_remote(h, f"exit {code}", stream=False)
        assert result.code == code
        assert result.duration_s >= 0

    @pytest.mark.parametrize("signum", [9, 15])
    def test_a_signal_is_128_and_its_number(
        self, adapter: BackendAdapter, h: InstanceHandle, signum: int
    ) -> None:
        """A shell that ends itself by a signal, and a child of it, both report 128 + n."""
        assert adapter.run_remote(h, f"kill -{signum} $$", stream=False).code == 128 + signum
        child = f"sh -c 'kill -{signum} $$' 2>/dev/null; exit $?"
        assert adapter.run_remote(h, child, stream=False).code == 128 + signum

    def test_env_arrives_and_is_in_no_argument_list(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """A value from env is in the command's environment and in nobody's command line."""
        arrived = f'test "$TOKEN" = {_SECRET} && test "$ODD" = "a b\'c;$(printf x)"'
        odd = "a b'c;x"
        env = {"TOKEN": _SECRET, "ODD": odd}
        assert adapter.run_remote(h, arrived, env=env, stream=False).code == 0
        look = (
            'printf %s "$TOKEN" > pattern; grep -qsF -f pattern /proc/[0-9]*/cmdline; '
            "found=$?; rm pattern; test $found -ne 0"
        )
        hidden = {"TOKEN": f"{_SECRET}-{uuid.uuid4().hex}"}
        assert adapter.run_remote(h, look, env=hidden, stream=False).code == 0

    def test_streamed_output_passes_through(
        self, adapter: BackendAdapter, h: InstanceHandle, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """With stream both outputs arrive; without it neither does."""
        adapter.run_remote(h, "echo to-out; echo to-err >&2")
        seen = capfd.readouterr()
        assert "to-out" in seen.out
        assert "to-err" in seen.out + seen.err
        adapter.run_remote(h, "echo to-out; echo to-err >&2", stream=False)
        assert capfd.readouterr() == ("", "")

    def test_a_timeout_ends_the_whole_group(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """After timeout_s neither the command, nor its children, nor their sessions go on."""
        command = (
            "beat() { while :; do date +%s%N > $1; sleep 0.05; done; }; "
            "export -f beat; setsid bash -c 'beat far' & beat near & wait"
        )
        with pytest.raises(CommandTimeoutError):
            adapter.run_remote(h, command, stream=False, timeout_s=1)
        still = "cp near near1; cp far far1; sleep 0.3; cmp -s near near1 && cmp -s far far1"
        assert adapter.run_remote(h, still, stream=False).code == 0

    def test_a_background_process_outlives_its_command(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """A command returns when its shell does; what it left behind runs on."""
        started = "(sleep 0.2; touch late) >/dev/null 2>&1 & exit 0"
        assert adapter.run_remote(h, started, stream=False).code == 0
        wait_until(
            lambda: adapter.run_remote(h, "test -e late", stream=False).code == 0,
            what="the background process",
            clock=self.clock,
            timeout_s=10,
            interval_s=0.05,
        )

    def test_teardown_ends_processes_and_can_be_repeated(
        self, adapter: BackendAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A second teardown is a warning, and every reader sees destroyed from then on."""
        h = self.provision(adapter, tmp_path)
        adapter.wait_running(h, timeout_s=600)
        adapter.run_remote(h, "sleep 600 >/dev/null 2>&1 & true", stream=False)
        adapter.teardown(h)
        assert adapter.status(h).state == InstanceState.DESTROYED
        older = replace(h, created_at=h.created_at - self.newborn_s)
        assert self.make().status(older).state == InstanceState.DESTROYED
        with caplog.at_level(logging.WARNING, logger="paceline"):
            adapter.teardown(h)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        if isinstance(adapter, SupportsListing):
            assert adapter.list_instances(label_prefix=h.label) == []

    def test_an_unknown_machine_is_gone_and_not_found(
        self, adapter: BackendAdapter, tmp_path: Path
    ) -> None:
        """Status says destroyed, teardown passes, everything else says not found."""
        for instance_id in ("i-never-was", "../../etc", ""):
            h = InstanceHandle(adapter.name, instance_id, "paceline-contract-x", 0.0)
            assert adapter.status(h).state == InstanceState.DESTROYED
            adapter.teardown(h)
            with pytest.raises(InstanceNotFoundError):
                adapter.run_remote(h, "true")
            with pytest.raises(InstanceNotFoundError):
                adapter.sync_to(h, tmp_path, "dst")
            with pytest.raises(InstanceNotFoundError):
                adapter.sync_from(h, "src", tmp_path)
            with pytest.raises((InstanceNotFoundError, DeadlineExceededError)):
                adapter.wait_running(h, timeout_s=1)
