"""Looks at a machine that has just come up, over its backend alone."""

import re
import tempfile
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental import acceptance, netfloor
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.errors import (
    ConnectionLostError,
    NotAcceptedError,
    RemoteCommandError,
    SshUnreachableError,
)
from paceline.rental.model import InstanceHandle, Offer
from paceline.rental.plan import RentRequest

_FOLDER = ".paceline-acceptance"
_NUM_TRIES = 3
_PAUSE_S = 5.0
_URL = re.compile(r"https?://[A-Za-z0-9.:/_?=&%+\[\]-]{1,500}")


class GpuAcceptance:
    """Runs the check on machines with GPUs; one that fails is not what was offered."""

    def __init__(
        self, *, clock: Clock, net_url: str = "", net_timeout_s: int = netfloor.PROBE_TIMEOUT_S
    ) -> None:
        """Take a clock, and where from the network is measured; without, from pip's own index.

        Raises ValueError for an address that could be more than one to a shell.
        """
        if net_url and _URL.fullmatch(net_url) is None:
            raise ValueError(f"{net_url!r} is no address to measure the network with")
        self._clock = clock
        self._net_url = net_url
        self._net_timeout_s = net_timeout_s

    def __call__(
        self, backend: BackendAdapter, machine: InstanceHandle, offer: Offer, request: RentRequest
    ) -> str:
        """Return what was seen of the network once the machine is what was offered.

        Raises:
            NotAcceptedError: it is not; the message says each thing that is wrong.
            SshUnreachableError: it does not let us in any more.
        """
        demand = acceptance.demand_of(
            request.gpu,
            offer,
            disk_gb=request.min_disk_gb,
            net_floor_mbps=request.net_floor_mbps,
        )
        if demand is None:
            return ""
        has_net = demand.net_mbps_min > 0
        report = acceptance.parse(self._ask(backend, machine, has_net=has_net))
        wrong = acceptance.objections(report, demand)
        if wrong:
            raise NotAcceptedError(
                f"{machine.backend} {machine.instance_id} is not what was offered: "
                + "; ".join(wrong)
            )
        return str(report.net) if has_net else ""

    def _ask(self, backend: BackendAdapter, machine: InstanceHandle, *, has_net: bool) -> str:
        """Return the machine's report; a connection that breaks is made again."""
        command = acceptance.script(
            _FOLDER, has_net=has_net, net_url=self._net_url, net_timeout_s=self._net_timeout_s
        )
        tries = 0
        while True:
            tries += 1
            try:
                backend.run_remote(
                    machine, command, stream=False, timeout_s=acceptance.SCRIPT_TIMEOUT_S
                )
                return self._fetch(backend, machine)
            except (SshUnreachableError, ConnectionLostError):
                if tries == _NUM_TRIES:
                    raise
                self._clock.sleep(_PAUSE_S)
            except RemoteCommandError as exc:
                raise NotAcceptedError(
                    f"{machine.backend} {machine.instance_id}: its check could not be made: {exc}"
                ) from exc

    def _fetch(self, backend: BackendAdapter, machine: InstanceHandle) -> str:
        with tempfile.TemporaryDirectory(prefix="paceline-acceptance-") as name:
            backend.sync_from(machine, f"{_FOLDER}/report", Path(name) / "report")
            try:
                with (Path(name) / "report").open("rb") as file:
                    return file.read(acceptance.REPORT_BYTES_MAX).decode(errors="replace")
            except OSError:
                return ""
