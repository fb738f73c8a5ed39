"""From what a provider says of a machine to a shell on it, with the address kept for a while."""

import contextlib
import re
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.core.clock import Clock
from paceline.rental.errors import InstanceNotFoundError, SshUnreachableError
from paceline.rental.model import InstanceHandle, InstanceState, InstanceStatus
from paceline.rental.remote.protocol import NetworkRemote, SshTarget

_ENDPOINT = re.compile(
    r"ssh://([a-z_][a-z0-9_-]{0,31})@(?:\[([0-9A-Fa-f:.%]{2,64})\]|([0-9A-Za-z.-]{1,255})):([0-9]{1,5})"
)
_KEEP_S = 120.0
"""How long an address is believed without asking again: providers limit how often one may ask,
and an address moves only when a machine is stopped and started."""


class Reach:
    """Shells on the machines of one backend; usable from several threads.

    Each machine has a known_hosts file of its own: addresses of rented machines are used again
    by others.
    """

    def __init__(
        self,
        *,
        status: Callable[[InstanceHandle], InstanceStatus],
        connect: Callable[[SshTarget, str], NetworkRemote],
        clock: Clock,
        identity: Path,
        known_hosts: Callable[[str, str], Path],
    ) -> None:
        self._status = status
        self._connect = connect
        self._clock = clock
        self._identity = identity
        self._known_hosts = known_hosts
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[NetworkRemote, SshTarget, float]] = {}

    def remote(self, h: InstanceHandle) -> NetworkRemote:
        """Return a shell on the machine; connects to nothing.

        Raises:
            InstanceNotFoundError: the provider says that it is gone.
            SshUnreachableError: it has no address yet.
        """
        return self._keep(h)[0]

    def target(self, h: InstanceHandle) -> SshTarget:
        """Return where the machine's sshd is. Raises as ``remote``."""
        return self._keep(h)[1]

    def _keep(self, h: InstanceHandle) -> tuple[NetworkRemote, SshTarget]:
        """Return what is known of a machine, asking its provider where that is too old."""
        with self._lock:
            kept = self._kept.get(h.instance_id)
        now_s = self._clock.monotonic()
        if kept is not None and now_s < kept[2]:
            return kept[:2]
        return self._kept_at(h, self._status(h))

    def _kept_at(
        self, h: InstanceHandle, status: InstanceStatus
    ) -> tuple[NetworkRemote, SshTarget]:
        target = ssh_target(
            h,
            status,
            identity=self._identity if self._identity.exists() else None,
            known_hosts=self._known_hosts(h.backend, h.instance_id),
        )
        remote = self._connect(target, h.instance_id)
        with self._lock:
            until_s = self._clock.monotonic() + _KEEP_S
            self._kept[h.instance_id] = (remote, target, until_s)
        return remote, target

    def probe(self, h: InstanceHandle, status: InstanceStatus) -> None:
        """Return once the machine's shell answers; one try, at the address that ``status`` has.

        Raises as ``remote`` and as a remote's own probe.
        """
        self.drop(h)
        self._kept_at(h, status)[0].probe()

    def drop(self, h: InstanceHandle) -> None:
        """Forget the machine's address and close the connection to it."""
        with self._lock:
            kept = self._kept.pop(h.instance_id, None)
        if kept is not None:
            kept[0].disconnect()

    def forget(self, h: InstanceHandle) -> None:
        """Forget the machine for good, with its host key."""
        self.drop(h)
        with contextlib.suppress(FileNotFoundError):
            self._known_hosts(h.backend, h.instance_id).unlink()


def ssh_target(
    h: InstanceHandle, status: InstanceStatus, *, identity: Path | None, known_hosts: Path
) -> SshTarget:
    """Return where the sshd of a machine is, by what its provider says.

    Raises as ``Reach.remote``.
    """
    name = f"{h.backend} machine {h.instance_id}"
    if InstanceState.parse(status.state) is InstanceState.DESTROYED:
        raise InstanceNotFoundError(f"{name} does not exist any more; see `paceline ls`")
    found = _ENDPOINT.fullmatch(status.public_endpoint or "")
    if found is None:
        raise SshUnreachableError(
            f"{name} has no address for ssh yet (state {status.state}); wait for it, or look at "
            "its status"
        )
    return SshTarget(
        name=name,
        host=found.group(2) or found.group(3),
        port=int(found.group(4)),
        user=found.group(1),
        known_hosts=known_hosts,
        identity=identity,
    )
