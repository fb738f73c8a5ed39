"""A tunnel that a trainer keeps to a rollout: scripts for both machines, as text. Pure.

The trainer's machine makes a key for itself. The rollout's lets that key in for two things: ports
of this run's loopback, and one script that holds the connection. A keeper on the rollout sees to it
that the line stays in authorized_keys, which some providers write anew after hours.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.address import LOOPBACK
from paceline.rental.remote.admitted import (
    DOOR,
    LABEL_PREFIX,
    RESTRICTED,
    SWEEP,
    command_option,
)
from paceline.rental.remote.protocol import SshTarget
from paceline.runs.model import Slot

PEERS = "peers"
"""Folder below the run's, on both machines."""
KEY = "key"
SHIFT = 6000
"""So much higher than a server's own port is where a kept tunnel leads to it: the own number, on
other machines' loopback, is the operator's."""
UP_TIMEOUT_S = 15
ADMIT_EVERY_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """One tunnel, and whose servers it carries."""

    run_id: str
    trainer: Slot
    rollout: Slot
    target: SshTarget
    """The rollout's sshd, as the world dials it."""
    trainer_ports: Sequence[int]
    rollout_ports: Sequence[int]

    @property
    def door(self) -> str:
        """Where the script that holds a connection is, from the rollout's login directory."""
        return f"{self.target.home}/{self.run_id}/{PEERS}/{DOOR}"


def admission(keeping: Keeping, public_key: str) -> str:
    """Return the line of authorized_keys, with @DIR@ for the absolute folder of the door."""
    kind, blob = public_key.split()[:2]
    options = [RESTRICTED]
    options += [f'permitopen="{LOOPBACK}:{port}"' for port in keeping.rollout_ports]
    options += [f'permitlisten="{LOOPBACK}:{port + SHIFT}"' for port in keeping.trainer_ports]
    options += [command_option("@DIR@", str(keeping.trainer))]
    name = f"{LABEL_PREFIX}{keeping.run_id}-{keeping.trainer}"
    return f"{','.join(options)} {kind} {blob} {name}\n"


def keep_script(keeping: Keeping) -> str:
    """Return what the trainer's machine runs for as long as the run lasts."""
    target = keeping.target
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": "hosts",
        "GlobalKnownHostsFile": "none",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ExitOnForwardFailure": "yes",
    }
    words = ["-F", "none", "-T", "-l", target.user, "-p", str(target.port), "-i", f"../{KEY}"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    forwards: list[str] = []
    for port in keeping.rollout_ports:
        forwards += ["-L", f"{LOOPBACK}:{port + SHIFT}:{LOOPBACK}:{port}"]
    for port in keeping.trainer_ports:
        forwards += ["-R", f"{LOOPBACK}:{port + SHIFT}:{LOOPBACK}:{port}"]
    asked = f"exec sh {shlex.quote(keeping.door)} {keeping.trainer}"
    return _fill(
        _KEEP,
        {
            "@OPTIONS@": shlex.join(words),
            "@FORWARDS@": shlex.join(forwards),
            "@HOST@": shlex.quote(target.host),
            "@RELEASE@": shlex.quote(f"{asked} release"),
            "@HOLD@": shlex.quote(f"{asked} hold"),
        },
    )


def admit_script(*, every_s: float = ADMIT_EVERY_S) -> str:
    """Return what the rollout runs to keep the line there, and take it away at the end."""
    return _fill(_ADMIT, {"@NAP@": f"{every_s:g}", "@SWEEP@": SWEEP})


def start_command(folder: str) -> str:
    """Return the command that starts what was put into a folder, in place of what ran there."""
    return _START.replace("@FOLDER@", shlex.quote(folder))


def await_command(folder: str) -> str:
    """Return the command that succeeds once the tunnel is up, and else ends its keeper."""
    return _AWAIT.replace("@FOLDER@", shlex.quote(folder)).replace("@NAPS@", str(UP_TIMEOUT_S * 5))


def stop_command(folder: str) -> str:
    """Return the command that ends what keeps a folder; fine when nothing does."""
    quoted = shlex.quote(f"{folder}/pid")
    return f"[ ! -s {quoted} ] || kill $(cat {quoted}) 2>/dev/null; :"


def key_command(folder: str) -> str:
    """Return the command that makes the trainer's own key, once."""
    return _KEY.replace("@FOLDER@", shlex.quote(folder)).replace("@KEY@", KEY)


def _fill(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


_KEY = """umask 077; mkdir -p @FOLDER@ && cd @FOLDER@ && command -v ssh >/dev/null || exit 1
[ -s @KEY@.pub ] || ssh-keygen -q -t ed25519 -N '' -C paceline -f @KEY@ </dev/null
"""

_START = """cd @FOLDER@ && chmod -R go= . || exit 1
[ ! -s pid ] || kill "$(cat pid)" 2>/dev/null
rm -f pid up
setsid=$(command -v setsid)
nohup $setsid sh ./keep.sh >/dev/null 2>&1 </dev/null &
tries=0
while [ ! -s pid ] && [ "$tries" -lt 200 ]; do tries=$((tries + 1)); sleep 0.05; done
[ -s pid ]
"""

_AWAIT = """cd @FOLDER@ || exit 1
tries=0
while [ ! -s up ] && [ "$tries" -lt @NAPS@ ]; do tries=$((tries + 1)); sleep 0.2; done
[ -s up ] && exit 0
kill "$(cat pid)" 2>/dev/null
exit 1
"""

_KEEP = """#!/bin/sh
# Written by paceline: keeps ssh from this machine to another of its run.
cd "$(dirname "$0")" || exit 1
umask 077
trap 'kill $! 2>/dev/null; exit 0' TERM INT
trap '' HUP
echo $$ > pid.new && mv pid.new pid || exit 1
while :; do
  ssh @OPTIONS@ -- @HOST@ @RELEASE@ </dev/null >/dev/null 2>said & wait $!
  ssh @OPTIONS@ @FORWARDS@ -- @HOST@ @HOLD@ </dev/null >up 2>said & wait $!
  : > up
  sleep 2 & wait $!
done
"""

# The parent of the shell that sshd starts is the sshd of that connection. One that died unheard
# still holds its ports, and is ended before the next connection asks for them.
DOOR_SCRIPT = """#!/bin/sh
# Written by paceline: all that a trainer of the run may start here.
cd "$(dirname "$0")" || exit 1
held="held-$1"
read -r boot < /proc/sys/kernel/random/boot_id
case "${SSH_ORIGINAL_COMMAND:-} ${2:-}" in
  *release*)
    read -r pid start kept 2>/dev/null < "$held" || exit 0
    [ "$kept" = "$boot" ] || exit 0
    line=
    { read -r line < "/proc/$pid/stat"; } 2>/dev/null
    set -- ${line##*) }
    [ "${20:-}" != "$start" ] || kill "$pid" 2>/dev/null
    rm -f "$held" ;;
  *hold*)
    parent=$PPID
    read -r line < "/proc/$parent/stat"
    set -- ${line##*) }
    echo "$parent ${20} $boot" > "$held"
    while echo up; do sleep 5; done ;;
  *) exit 1 ;;
esac
"""

_ADMIT = """#!/bin/sh
# Written by paceline: lets the trainers of a run in here, for as long as it lasts.
cd "$(dirname "$0")" || exit 1
umask 077
file="$HOME/.ssh/authorized_keys"
here=$(cd .. && pwd)
@SWEEP@
lines() { for one in line-*; do [ -f "$one" ] && sed "s|@DIR@|$here|" "$one"; done; }
leave() {
  kill $! 2>/dev/null
  lines | without "$file"
  exit 0
}
trap leave TERM INT
trap '' HUP
mkdir -p "$HOME/.ssh"
touch "$file"
sweep "$file"
admit() {
  lines | while read -r line; do
    grep -qxF -- "$line" "$file" && continue
    [ -z "$(tail -c 1 "$file")" ] || echo >> "$file"
    printf '%s\\n' "$line" >> "$file"
  done
}
admit
echo $$ > pid.new && mv pid.new pid || exit 1
while :; do
  sleep @NAP@ & wait $!
  admit
done
"""
