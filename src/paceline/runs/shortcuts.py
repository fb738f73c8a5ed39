"""Ways between a trainer and a rollout that leave the operator's line out: tried, set up, told.

A failure here costs nothing but the shortcut: whoever cannot have one goes through the operator.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from paceline.core.address import LOOPBACK, is_loopback, join_address, split_address
from paceline.core.errors import PacelineError
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.records import Machine
from paceline.rental.remote.admitted import DOOR
from paceline.rental.remote.protocol import Access, SshTarget
from paceline.runs import keeping
from paceline.runs.beacon import hear_command, knock_command, raise_command, strike_command
from paceline.runs.bootstrap import Guest
from paceline.runs.model import RoleKind, Slot
from paceline.runs.reach import Mode, Place, Shortcut, may_shorten

STEP_TIMEOUT_S = 30
ROUTES_FILE = "routes.json"
"""Below the run's folder on a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One slot's machine, and all that is known of how it is reached."""

    place: Place
    machine: Machine
    access: Access | None

    @property
    def slot(self) -> Slot:
        """Whose machine it is."""
        return self.place.slot


@dataclass(slots=True, kw_only=True)
class _Trainer:
    """What was made on one trainer's machine, once."""

    lock: Lock = field(default_factory=Lock)
    public_key: str | None = None


class Shortcuts:
    """Finds shortcuts of one run; several threads may use it."""

    def __init__(
        self,
        *,
        run_id: str,
        ports: Mapping[Slot, Sequence[int]],
        backend: Callable[[str], BackendAdapter],
        word: str,
        has_http: bool,
        note: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            run_id: whose.
            ports: where each role's servers listen.
            backend: by name.
            word: what a probe says, which nobody else does.
            has_http: weights travel over a port that can be dialled.
            note: is told why there is no shortcut where one was tried.
        """
        self._run_id = run_id
        self._ports = ports
        self._backend = backend
        self._word = word
        self._has_http = has_http
        self._note = note
        self._trainers: dict[str, _Trainer] = {}
        self._lock = Lock()

    def between(self, one: Spot, other: Spot) -> list[Shortcut]:
        """Return the shortcuts that were found, and set up, between two machines: 0, 1 or 2."""
        kinds = {spot.place.kind: spot for spot in (one, other)}
        if set(kinds) != {RoleKind.TRAINER, RoleKind.ROLLOUT}:
            return []
        if not may_shorten(one.place, other.place):
            return []
        trainer, rollout = kinds[RoleKind.TRAINER], kinds[RoleKind.ROLLOUT]
        with self._lock:
            mine = self._trainers.setdefault(trainer.machine.label, _Trainer())
        found = {way.target: way for way in self._kept(trainer, rollout, mine)}
        with mine.lock:  # its port can be tried by one at a time
            for source, target in ((rollout, trainer), (trainer, rollout)):
                direct = self._dialled(source, target)
                if direct is not None:
                    found[target.slot] = direct
        return list(found.values())

    def tell(self, spot: Spot, shortcuts: Sequence[Shortcut]) -> None:
        """Write down on a machine which of them are its own. Raises BackendError."""
        routes: dict[str, str] = {}
        for way in shortcuts:
            if way.source == spot.slot:
                routes |= way.routes
        file = self._guest(spot).path(ROUTES_FILE)
        text = shlex.quote(json.dumps(routes))
        folder = shlex.quote(self._run_id)
        command = f"mkdir -p {folder} && printf %s {text} > {file}.new && mv {file}.new {file}"
        self._must(spot, command, "writing the table of routes")

    def _dialled(self, source: Spot, target: Spot) -> Shortcut | None:
        """Return the way by mapped ports, if one of them answers from there."""
        ports = self._ports.get(target.slot, ())
        mapped = target.place.mapped
        is_meant = target.place.is_open and bool(ports) and all(port in mapped for port in ports)
        if not is_meant or not (self._has_http or target.place.kind is RoleKind.ROLLOUT):
            return None
        first = ports[0]
        host, outside = split_address(mapped[first])
        try:
            if self._succeeds(target, raise_command(first, self._word)):
                works = self._succeeds(source, hear_command(outside, self._word, host=host))
                self._succeeds(target, strike_command(first))
            else:  # somebody listens there already: the role itself, of a run that goes on
                works = self._succeeds(source, knock_command(host, outside))
        except (PacelineError, OSError) as exc:
            self._note(f"{source.slot} does not dial {target.slot}: {exc}")
            return None
        if not works:
            return None
        return Shortcut(
            source=source.slot,
            target=target.slot,
            mode=Mode.DIRECT,
            why=f"its port is mapped to {mapped[first]}, which answers there",
            ways={port: mapped[port] for port in ports},
        )

    def _kept(self, trainer: Spot, rollout: Spot, mine: _Trainer) -> list[Shortcut]:
        """Return both directions of a tunnel that the trainer's machine keeps, if it can."""
        target = rollout.access
        ports = self._ports.get(trainer.slot, ()), self._ports.get(rollout.slot, ())
        if not isinstance(target, SshTarget) or not all(ports) or not trainer.place.can_tunnel:
            return []
        if target.proxy_jump or is_loopback(target.host) or not target.known_hosts.exists():
            return []
        plan = keeping.Keeping(
            run_id=self._run_id,
            trainer=trainer.slot,
            rollout=rollout.slot,
            target=target,
            trainer_ports=ports[0],
            rollout_ports=ports[1],
        )
        try:
            if not self._succeeds(trainer, knock_command(target.host, target.port)):
                self._succeeds(trainer, keeping.stop_command(self._folder(trainer, rollout.slot)))
                return []
            self._admit(rollout, plan, self._public_key(trainer, mine))
            self._keep(trainer, plan)
        except (PacelineError, OSError) as exc:
            self._note(f"{trainer.slot} keeps no tunnel to {rollout.slot}: {exc}")
            return []
        why = f"kept by {trainer.slot}, from where ssh to {rollout.slot} works"
        pairs = ((trainer, rollout, ports[1]), (rollout, trainer, ports[0]))
        return [
            Shortcut(
                source=source.slot,
                target=end.slot,
                mode=Mode.TUNNEL,
                why=why,
                ways={port: join_address(LOOPBACK, port + keeping.SHIFT) for port in own},
            )
            for source, end, own in pairs
        ]

    def _public_key(self, trainer: Spot, mine: _Trainer) -> str:
        """Return the public half of a key that never leaves the trainer's machine."""
        with mine.lock:
            if mine.public_key is None:
                folder = self._guest(trainer).path(keeping.PEERS)
                self._must(trainer, keeping.key_command(folder), "making a key with ssh-keygen")
                with TemporaryDirectory() as name:
                    here = Path(name) / "key.pub"
                    backend = self._backend(trainer.machine.backend)
                    backend.sync_from(trainer.machine.handle, f"{folder}/{keeping.KEY}.pub", here)
                    mine.public_key = here.read_text(encoding="ascii")
            return mine.public_key

    def _admit(self, rollout: Spot, plan: keeping.Keeping, public_key: str) -> None:
        folder = self._guest(rollout).path(keeping.PEERS)
        files = {
            DOOR: keeping.DOOR_SCRIPT,
            "admit/keep.sh": keeping.admit_script(),
            f"admit/line-{plan.trainer}": keeping.admission(plan, public_key),
        }
        self._put(rollout, folder, files)
        self._must(rollout, keeping.start_command(f"{folder}/admit"), "letting the trainer in")

    def _keep(self, trainer: Spot, plan: keeping.Keeping) -> None:
        folder = self._folder(trainer, plan.rollout)
        known = plan.target.known_hosts.read_text(encoding="utf-8")
        self._put(trainer, folder, {"keep.sh": keeping.keep_script(plan), "hosts": known})
        self._must(trainer, keeping.start_command(folder), "starting the tunnel")
        self._must(trainer, keeping.await_command(folder), "connecting (see peers/*/said there)")

    def _folder(self, trainer: Spot, rollout: Slot) -> str:
        return self._guest(trainer).path(keeping.PEERS, str(rollout))

    def _put(self, spot: Spot, folder: str, files: Mapping[str, str]) -> None:
        with TemporaryDirectory() as name:
            for file, text in files.items():
                here = Path(name) / file
                here.parent.mkdir(exist_ok=True)
                here.write_text(text, encoding="utf-8")
            self._backend(spot.machine.backend).sync_to(spot.machine.handle, Path(name), folder)

    def _succeeds(self, spot: Spot, command: str) -> bool:
        backend = self._backend(spot.machine.backend)
        ended = backend.run_remote(
            spot.machine.handle, command, stream=False, timeout_s=STEP_TIMEOUT_S
        )
        return ended.code == 0

    def _must(self, spot: Spot, command: str, what: str) -> None:
        if not self._succeeds(spot, command):
            raise ShortcutError(f"{what} did not work on {spot.slot}")

    def _guest(self, spot: Spot) -> Guest:
        return Guest(run_id=self._run_id, slot=spot.slot)


class ShortcutError(PacelineError):
    """A step on a machine did not work; the long way is there."""
