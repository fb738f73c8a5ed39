"""Ports of one machine's loopback that are ports of ours, or the other way, kept so.

An ssh connection of its own per machine carries them all. It is one of our scripts there that says
when they are up and goes on saying so; silence, like a connection that ends, means another try. The
sshd of a connection that died unheard still holds its ports: the script has written down which
process that is, and the next try ends it first.
"""

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.address import join_address
from paceline.core.clock import Clock
from paceline.core.retry import RetryPolicy
from paceline.rental.errors import BackendError, SshUnreachableError
from paceline.rental.remote.channel import Channel, ChannelBrokenError, Line, ask, open_line, refuse
from paceline.rental.remote.frames import Word
from paceline.rental.remote.script import GREETING, fill

BEAT_S = 5
_SILENCE_S = 3.0 * BEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPlan:
    """What is forwarded; a port has one number on both ends, and listens on loopback there."""

    name: str
    """Tells this tunnel from others to the same machine; letters, digits and dashes."""
    to_here: tuple[tuple[int, str], ...] = ()
    """Ports of the machine's loopback, and the address of this computer that each leads to."""
    from_here: tuple[int, ...] = ()
    """Ports of this computer's loopback that lead to the machine's."""


def forward_words(plan: TunnelPlan) -> list[str]:
    """Return ssh's options for the forwards; one that cannot be made ends the connection."""
    words = ["-o", "ExitOnForwardFailure=yes"]
    for port, host in plan.to_here:
        words += ["-R", f"127.0.0.1:{port}:{join_address(host, port)}"]
    for port in plan.from_here:
        words += ["-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    return words


class ForwardingChannel:
    """A Channel whose connection carries forwards; it must be nobody else's connection."""

    def __init__(self, inner: Channel, words: Sequence[str]) -> None:
        self._inner = inner
        self._words = list(words)
        self.name = inner.name
        self.host = inner.host
        self.home = inner.home
        self.jobs = inner.jobs
        self.has_login_shell = inner.has_login_shell

    def words(self) -> list[str]:
        """Return the command with the forwards."""
        program, *rest = self._inner.words()
        return [program, *self._words, *rest]

    def argv(self, program: Sequence[str]) -> list[str]:
        """Return the command for ``program`` with the forwards."""
        first, *rest = self._inner.argv(program)
        return [first, *self._words, *rest]

    def error_of(self, said: str) -> BackendError:
        """Say which port is taken, or what the connection's own words mean."""
        if "forwarding failed" in said or "Address already in use" in said:
            return SshUnreachableError(
                f"{self.name}: a port of the tunnel is taken: {said.strip()[-200:]}"
            )
        return self._inner.error_of(said)

    def reset(self) -> None:
        """Do nothing: the connection ends with its command."""


class Tunnel:
    """Keeps one machine's forwards up in a thread until it is closed."""

    def __init__(
        self,
        channel: Channel,
        plan: TunnelPlan,
        *,
        clock: Clock,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Take the parts; connects nothing.

        Args:
            channel: to an sshd, not shared with anybody.
            plan: what is forwarded.
            clock: for waits.
            retry: how late to try again.
        """
        self.plan = plan
        self.num_ups = 0
        """How often it came up."""
        self.trouble = ""
        """Why it is down; empty while it is up."""
        self._plain = channel
        self._channel = ForwardingChannel(channel, forward_words(plan))
        self._clock = clock
        self._retry = retry or RetryPolicy(attempts=1_000_000, first_delay_s=0.2, delay_s_max=10.0)
        self._line: Line | None = None
        self._closing = threading.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"tunnel-{plan.name}", daemon=True)

    def open(self, *, timeout_s: float) -> None:
        """Begin to keep it up, and return once it is. Raises SshUnreachableError in time."""
        self._thread.start()
        if not self._is_up.wait(timeout_s):
            self.close()
            raise SshUnreachableError(
                f"{self._plain.name}: no tunnel after {timeout_s:g} s: "
                f"{self.trouble or 'no answer'}; see that its sshd allows TCP forwarding"
            )

    @property
    def is_up(self) -> bool:
        """Return whether it carried something to be heard just now."""
        return self._is_up.is_set()

    def close(self) -> None:
        """Let it go down; idempotent."""
        self._closing.set()
        if self._line is not None:
            self._line.process.terminate()
        if self._thread.is_alive():
            self._thread.join(_SILENCE_S)

    def _keep(self) -> None:
        tries = 0
        while not self._closing.is_set():
            ups = self.num_ups
            try:
                self._carry()
            except ChannelBrokenError as exc:
                self.trouble = str(self._channel.error_of(exc.said))
            except BackendError as exc:
                self.trouble = str(exc)
            self._is_up.clear()
            tries = 0 if self.num_ups > ups else tries + 1
            if self._closing.wait(self._retry.delay_s(max(1, tries), chance=0.5) or 0.0):
                return
            self._release()

    def _carry(self) -> None:
        """Hold the connection until it breaks, goes silent, or we are to close."""
        script = _fill(_HOLD, self._plain, self.plan)
        with open_line(self._channel, script, clock=self._clock, silence_s=_SILENCE_S) as line:
            self._line = line
            if self._closing.is_set():
                return
            for event in line.events():
                if isinstance(event, Word):
                    self._hear(refuse(self._plain, event))

    def _hear(self, word: Word) -> None:
        if word.letter == "S":
            self.num_ups += 1
            self.trouble = ""
            self._is_up.set()

    def _release(self) -> None:
        """End what the last connection left on the machine; one that is out of reach is later."""
        try:
            ask(self._plain, _fill(_RELEASE, self._plain, self.plan), clock=self._clock)
        except BackendError as exc:
            self.trouble = str(exc)


def _fill(template: str, channel: Channel, plan: TunnelPlan) -> str:
    return fill(
        template,
        {
            "@GREETING@": GREETING,
            "@HOME@": shlex.quote(channel.home),
            "@JOBS@": shlex.quote(channel.jobs),
            "@NAME@": plan.name,
            "@BEAT@": str(BEAT_S),
        },
    )


# The parent of the shell that ssh starts is the sshd of its connection.
_HOLD = """
main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  mkdir -p @JOBS@ || { echo 'F cannot-record'; return; }
  read -r boot < /proc/sys/kernel/random/boot_id
  read -r line < "/proc/$PPID/stat"
  set -- ${line##*) }
  echo "$PPID ${20} $boot" > @JOBS@/tunnel-@NAME@
  echo S
  while :; do sleep @BEAT@; echo H || return; done
}

main; exit
"""

_RELEASE = """
main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  read -r boot < /proc/sys/kernel/random/boot_id
  if read -r pid start kept 2>/dev/null < @JOBS@/tunnel-@NAME@ && [ "$kept" = "$boot" ]; then
    line=
    { read -r line < "/proc/$pid/stat"; } 2>/dev/null
    set -- ${line##*) }
    [ "${20:-}" != "$start" ] || kill "$pid" 2>/dev/null
    rm -f @JOBS@/tunnel-@NAME@
  fi
  echo 'N released'
}

main; exit
"""
