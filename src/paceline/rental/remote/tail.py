"""Follow a file on a machine from a place in it, over as many connections as it takes.

A place is a file's own number (its inode) and how many of its bytes were taken: names move when a
log is rotated, numbers do not. The script there holds the file open, so that one that is renamed or
removed is read to its end before the next is begun, and passes bytes on behind their count, so that
a connection that breaks in the middle loses none and doubles none. ``LOG.1`` is older than ``LOG``,
``LOG.2`` older than that.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.rental.errors import (
    BackendError,
    HostKeyChangedError,
    InstanceNotFoundError,
    SshKeyError,
)
from paceline.rental.remote.channel import Channel, ChannelBrokenError, open_line, refuse
from paceline.rental.remote.frames import Output, Word
from paceline.rental.remote.script import CHUNK_BYTES, GREETING, HEARTBEAT_S, fill

Sink = Callable[[bytes], None]
"""Takes the next bytes of a file."""
_SILENCE_S = 6.0 * HEARTBEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far a file was read."""

    inode: str = ""
    """Empty before the first byte: the oldest that there is."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tailed:
    """What is followed."""

    home: str
    path: str
    """Relative to ``home``."""
    until: str | None = None
    """Once this path exists, and all that the file holds is read, it is over; None: at its end."""


def render_tail(tailed: Tailed, place: Place) -> str:
    """Return the script that passes on what the file holds from ``place`` on."""
    texts = {
        "@GREETING@": GREETING,
        "@HOME@": shlex.quote(tailed.home),
        "@LOG@": shlex.quote(tailed.path),
        "@UNTIL@": shlex.quote(tailed.until or ""),
        "@INODE@": place.inode,
        "@AT@": str(place.num_bytes),
        "@CHUNK@": str(CHUNK_BYTES),
        "@BEATS@": str(HEARTBEAT_S * 4),
    }
    return fill(_TAIL, texts)


class Tail:
    """Follows one file; ``place`` says how far, also after an error, and may be handed on."""

    def __init__(
        self,
        channel: Channel,
        tailed: Tailed,
        *,
        clock: Clock,
        sink: Sink,
        patience_s: float = 300.0,
    ) -> None:
        self.place = Place()
        self.num_gaps = 0
        """How often bytes were gone before they could be read: removed or cut off."""
        self._channel = channel
        self._tailed = tailed
        self._clock = clock
        self._sink = sink
        self._patience_s = patience_s
        self._retry = RetryPolicy(attempts=1_000_000, first_delay_s=0.2, delay_s_max=5.0)

    def run(self) -> None:
        """Pass on what comes until it is over.

        Raises:
            InstanceNotFoundError, SshUnreachableError, ConnectionLostError: the machine is gone,
                or has been out of reach for longer than patience lasts.
        """
        since_s: float | None = None
        tries = 0
        while True:
            before = self.place
            try:
                return self._attach()
            except ChannelBrokenError as exc:
                self._channel.reset()
                error = self._channel.error_of(exc.said)
                if isinstance(error, HostKeyChangedError | SshKeyError | InstanceNotFoundError):
                    raise error from exc
                if exc.was_greeted or self.place != before:
                    since_s, tries = None, 0
                now_s = self._clock.monotonic()
                since_s = now_s if since_s is None else since_s
                if now_s - since_s > self._patience_s:
                    raise _gave_up(error, now_s - since_s) from exc
            tries += 1
            self._clock.sleep(self._retry.delay_s(tries, chance=0.5) or 0.0)

    def _attach(self) -> None:
        script = render_tail(self._tailed, self.place)
        with open_line(self._channel, script, clock=self._clock, silence_s=_SILENCE_S) as line:
            for event in line.events():
                if isinstance(event, Output):
                    self._sink(event.content)
                    taken = self.place.num_bytes + len(event.content)
                    self.place = replace(self.place, num_bytes=taken)
                elif isinstance(event, Word) and self._take(refuse(self._channel, event)):
                    line.acknowledge()
                    return

    def _take(self, word: Word) -> bool:
        """Note which file comes next; return whether it is over."""
        if word.letter == "N":
            self.place = Place(inode=word.rest)
        elif word.letter == "L":
            self.num_gaps += 1
        return word.letter == "X"


def _gave_up(error: BackendError, away_s: float) -> BackendError:
    return type(error)(f"{error}; it has not answered for {away_s:.0f} s")


# `wc -c` and `tail` open the file again through /proc, so that they read the one that is held,
# whatever its name is by now.
_TAIL = """
number() { set -- $(ls -iL -- "$1" 2>/dev/null); echo "${1:-}"; }

oldest() {
  found= n=1
  while [ -f "$log.$n" ]; do found=$log.$n n=$((n + 1)); done
  [ -n "$found" ] || found=$log
  echo "$found"
}

named() {
  [ "$(number "$log")" != "$1" ] || { echo "$log"; return; }
  n=1
  while [ -f "$log.$n" ]; do
    [ "$(number "$log.$n")" != "$1" ] || { echo "$log.$n"; return; }
    n=$((n + 1))
  done
}

newer() {
  case "$1" in
    "$log.1") echo "$log";;
    "$log."*) echo "$log.$((${1##*.} - 1))";;
    *) oldest;;
  esac
}

hold() {
  [ -f "$1" ] && { exec 3< "$1"; } 2>/dev/null || return 1
  now=$(number "/proc/$$/fd/3")
  [ -n "$now" ] || return 1
  if [ "$now" != "$inode" ]; then inode=$now at=0; echo "N $inode"; fi
  held=yes
}

emit() {
  size=$(wc -c < "/proc/$$/fd/3")
  if [ "$size" -lt "$at" ]; then echo "L cut"; echo "N $inode"; at=0; fi
  num=$((size - at))
  [ "$num" -gt 0 ] || return 1
  [ "$num" -le @CHUNK@ ] || num=@CHUNK@
  echo "O $num"
  tail -c "+$((at + 1))" "/proc/$$/fd/3" | head -c "$num"
  at=$((at + num))
}

turn() {
  name=$(named "$inode")
  [ "$name" != "$log" ] || return 1
  [ -f "$log" ] || return 1
  if emit; then return 0; fi
  hold "$(newer "$name")"
}

nap() {
  idle=$((idle + 1))
  if [ "$idle" -le 20 ]; then sleep 0.05 2>/dev/null || sleep 1
  else sleep 0.25 2>/dev/null || sleep 1; fi
  [ $((idle % @BEATS@)) -ne 0 ] || echo H
}

main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  log=@LOG@ until=@UNTIL@ inode=@INODE@ at=@AT@ idle=0 held=
  if [ -n "$inode" ] && ! hold "$(named "$inode")"; then echo "L $inode"; inode=; fi
  while :; do
    over=yes
    if [ -n "$until" ]; then over=; [ ! -e "$until" ] && [ ! -L "$until" ] || over=yes; fi
    if [ -n "$held" ] || hold "$(oldest)"; then
      if emit || turn; then idle=0; continue; fi
    fi
    if [ -n "$over" ]; then echo 'X 0'; read -r answer; return; fi
    nap
  done
}

main; exit
"""
