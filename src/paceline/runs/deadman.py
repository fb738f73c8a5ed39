"""The dead-man switch: a script on each machine that ends it when nobody asks after it any more.

The script counts its own naps, not a clock's seconds: a clock that is set right after boot, or a
machine that was suspended, makes nothing expire. A *beat* is a new word in a file; whoever writes
one (the driver over the machine's shell, or a role whose control service answered) starts the
count again. At the end of the count the script does what the provider's recipe says, with the
credential that the machine has for itself alone, again and again until it works or a beat comes.
Where a machine cannot end itself, what runs on it is ended, and that is all that can be promised.
It brings nothing back: what is not pulled by then is lost.
"""

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PreflightError
from paceline.rental import (
    BackendAdapter,
    InstanceHandle,
    RemoteCommandError,
    SelfDestroyRecipe,
    SupportsSelfDestroy,
)
from paceline.runs.bootstrap import Guest, write_secret
from paceline.runs.fleet import Fleet
from paceline.runs.model import Slot

BEATS_PER_DEADLINE = 20
BEAT_S_MAX = 60.0
NAP_S_MAX = 15.0
ARM_TIMEOUT_S = 60
BEAT_TIMEOUT_S = 30
FOLDER = "deadman"
LEASE = "lease"
LOG_PREFIX = "deadman-"
"""Of the switch's own log, before the slot's name."""
LEASE_VARIABLE = "PACELINE_LEASE"
"""Where a role finds the file that it writes a word to whenever its control service answers."""

PROCESS_STOP = SelfDestroyRecipe(
    command="",
    env={},
    guarantee="What the run started on it is ended. The machine itself cannot be ended from "
    "inside and bills on, where it costs money, until paceline down or gc.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arming:
    """How one machine's switch is set."""

    after_s: float
    recipe: SelfDestroyRecipe
    slot: Slot

    grace_s: float = 5.0
    """For roles to end after they were asked to, before they are killed."""

    @property
    def nap_s(self) -> float:
        """How long the script sleeps between two looks; a second where sleep takes no fractions."""
        return min(NAP_S_MAX, round(self.after_s / BEATS_PER_DEADLINE, 2))

    @property
    def num_naps(self) -> int:
        """How many naps without a beat make it fire."""
        return round(self.after_s / self.nap_s)


def recipe_of(backend: BackendAdapter, handle: InstanceHandle) -> SelfDestroyRecipe:
    """Return how a machine ends itself, or only what runs on it."""
    if isinstance(backend, SupportsSelfDestroy):
        return backend.self_destroy_recipe(handle)
    return PROCESS_STOP


def render_switch(arming: Arming) -> str:
    """Return the script that waits; it needs nothing but a POSIX shell."""
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in arming.recipe.env.items()
    )
    texts = {
        "@NAP@": f"{arming.nap_s:g}",
        "@GRACE@": f"{arming.grace_s:g}",
        "@NAPS@": str(arming.num_naps),
        "@AFTER@": f"{arming.after_s:g}",
        "@EXPORTS@": exports,
        "@CAN@": "yes" if arming.recipe.command else "",
        "@DESTROY@": arming.recipe.command or ":",
        "@SLOT@": str(arming.slot),
        "@LOG@": LOG_PREFIX,
    }
    text = _SWITCH
    for name, value in texts.items():
        text = text.replace(name, value)
    return text


def arm(backend: BackendAdapter, handle: InstanceHandle, *, guest: Guest, arming: Arming) -> None:
    """Put the switch on a machine and start it; one that waits there already is replaced.

    Raises BackendError when it could not be started: the machine is then not to be used.
    """
    with TemporaryDirectory() as folder:
        here = Path(folder) / FOLDER
        try:
            here.mkdir(mode=0o700)
            write_secret(here / "switch.sh", render_switch(arming))
        except OSError as exc:
            raise PreflightError(f"cannot write {exc.filename}: {exc.strerror}") from exc
        backend.sync_to(handle, here, guest.path(FOLDER))
    ended = backend.run_remote(
        handle, _ARM.replace("@FOLDER@", guest.path(FOLDER)), stream=False, timeout_s=ARM_TIMEOUT_S
    )
    if ended.code != 0:
        raise RemoteCommandError(
            f"the dead-man switch on {handle.label} was not started: status {ended.code}"
        )


def beat_command(guest: Guest, word: str) -> str:
    """Return the shell line that tells a machine that somebody asks after it."""
    lease = guest.path(FOLDER, LEASE)
    return f"echo {word} > {lease}.new && mv {lease}.new {lease}"


class Heart:
    """Beats for all machines of a run, each in a thread that may hang without stopping others."""

    def __init__(
        self, fleet: Fleet, *, clock: Clock, word: Callable[[], str], after_s: float
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._word = word
        self._every_s = min(BEAT_S_MAX, after_s / BEATS_PER_DEADLINE)
        self._due_s: dict[str, float] = {}
        self._is_out: dict[str, Callable[[], bool]] = {}

    def poll(self) -> None:
        """Begin the beats that are due; never blocks."""
        now_s = self._clock.monotonic()
        for slot, machine in self._fleet.machines.items():
            label = machine.label
            is_out = self._is_out.get(label)
            if now_s < self._due_s.setdefault(label, now_s + self._every_s):
                continue
            if is_out is None or not is_out():
                self._due_s[label] = now_s + self._every_s
                self._is_out[label] = self._fleet.errand(slot, self._beat).is_alive

    def _beat(
        self, slot: Slot, backend: BackendAdapter, handle: InstanceHandle, guest: Guest
    ) -> None:
        """Beat once. A machine that does not answer is no news: losing it is told elsewhere."""
        command = beat_command(guest, self._word())
        with suppress(PacelineError):
            backend.run_remote(handle, command, stream=False, timeout_s=BEAT_TIMEOUT_S)


def armed_fields(slot: Slot, arming: Arming) -> Mapping[str, object]:
    """Return what is put on record about a switch: also what it cannot promise."""
    return {
        "role": slot.role,
        "index": slot.index,
        "after_s": arming.after_s,
        "guarantee": arming.recipe.guarantee,
    }


_ARM = """cd @FOLDER@ && chmod 700 . && chmod 600 switch.sh && echo armed > lease || exit 1
[ ! -s pid ] || kill "$(cat pid)" 2>/dev/null
rm -f pid fired
setsid=$(command -v setsid)
nohup $setsid sh ./switch.sh >/dev/null 2>&1 </dev/null &
tries=0
while [ ! -s pid ] && [ "$tries" -lt 200 ]; do tries=$((tries + 1)); sleep 0.05; done
[ -s pid ]
"""

# The word is compared, not the file's time: only a change counts, and no clock is asked. `wait` on
# a nap in the background lets a TERM through at once.
_SWITCH = """#!/bin/sh
# Written by paceline: ends this machine when nobody has asked after it for @AFTER@ s.
set -u
cd "$(dirname "$0")" || exit 1
umask 077
@EXPORTS@log() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >> ../logs/@LOG@@SLOT@.log; }
trap 'exit 0' TERM INT
trap '' HUP
echo $$ > pid.new && mv pid.new pid || exit 1
seen=$(cat lease 2>/dev/null)
left=@NAPS@
log "armed: fires after @AFTER@ s without a beat"

is_renewed() {
  word=$(cat lease 2>/dev/null)
  [ "$word" != "$seen" ] || return 1
  seen=$word
}

rest() { (sleep "$1" 2>/dev/null || sleep 1) & wait $!; }

await_silence() {
  left=@NAPS@
  while [ "$left" -gt 0 ]; do
    rest @NAP@
    if is_renewed; then left=@NAPS@; else left=$((left - 1)); fi
  done
}

stop_roles() {
  for stop in ../kit/stop*.sh; do [ -f "$stop" ] && sh "$stop"; done
  rest @GRACE@
  for file in ../state/*/*/pid; do
    [ -s "$file" ] || continue
    read -r pid start boot group < "$file"
    kill -s KILL -- "-$group" 2>/dev/null
  done
}

destroy() {
@DESTROY@
}

await_silence
if [ -z '@CAN@' ]; then
  log "nobody has asked after this machine for @AFTER@ s: ending what runs on it"
  echo 1 > fired
  stop_roles
  log "ended; the machine itself cannot be ended from inside"
  exit 0
fi
tries=0
while :; do
  tries=$((tries + 1))
  log "nobody has asked after this machine for @AFTER@ s: ending it (try $tries)"
  echo "$tries" > fired
  if (destroy) >> ../logs/@LOG@@SLOT@.log 2>&1; then
    log "the order to end it was taken"
  else
    log "ending it failed with status $?"
  fi
  [ "$tries" -gt 1 ] || stop_roles
  if [ "$tries" -le 20 ]; then rest @NAP@; else rest 60; fi
  if is_renewed; then
    rm -f fired; tries=0
    log "somebody asks after it again: standing down"
    await_silence
  fi
done
"""
