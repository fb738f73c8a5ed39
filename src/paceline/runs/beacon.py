"""A port on this computer's loopback that says one word: who hears it there is here."""

import contextlib
import shlex
import socket
import threading
from types import TracebackType
from typing import Self

from paceline.core.address import LOOPBACK
from paceline.core.errors import PreflightError

TIMEOUT_S = 5.0
_PROBE = """\
host=$1 port=$2 word=$3
if command -v bash >/dev/null && command -v timeout >/dev/null; then
  said=$(timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1" && head -n 1 <&3' "$host" "$port") || exit 1
else
  python=$(command -v python3 || command -v python) || exit 2
  said=$("$python" -c 'import socket, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
c.settimeout(5)
print(c.recv(200).decode().split("\\n")[0])' "$host" "$port") || exit 1
fi
[ -z "$word" ] || [ "$said" = "$word" ]
"""
_KNOCK = """\
host=$1 port=$2
if command -v bash >/dev/null && command -v timeout >/dev/null; then
  exec timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$host" "$port"
fi
python=$(command -v python3 || command -v python) || exit 2
exec "$python" -c 'import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)' "$host" "$port"
"""


_RAISE = """\
import os, signal, socket, sys
port, word = int(sys.argv[1]), sys.argv[2]
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("0.0.0.0", port))
s.listen(8)
child = os.fork()
if child:
    with open(f".paceline-beacon-{port}", "w") as f:
        f.write(str(child))
    os._exit(0)
os.setsid()
signal.alarm(40)
null = os.open(os.devnull, os.O_RDWR)
for end in (0, 1, 2):
    os.dup2(null, end)
while True:
    c, _ = s.accept()
    try:
        c.sendall((word + "\\n").encode())
    except OSError:
        pass
    c.close()
"""


def hear_command(port: int, word: str, *, host: str = LOOPBACK) -> str:
    """Return the command that succeeds where a port says ``word``."""
    return f"sh -c {shlex.quote(_PROBE)} hear {shlex.quote(host)} {port} {word} 2>/dev/null"


def raise_command(port: int, word: str) -> str:
    """Return the command that has a machine's port say ``word`` for a while, and returns at once.

    It fails where the port is taken, and where there is no Python to do it.
    """
    python = "python=$(command -v python3 || command -v python) || exit 2"
    run = f'exec "$python" -c {shlex.quote(_RAISE)} {port} {word}'
    return f"{python}; {run} 2>/dev/null"


def strike_command(port: int) -> str:
    """Return the command that ends what ``raise_command`` left; fine when that has gone."""
    file = f".paceline-beacon-{port}"
    return f"kill $(cat {file}) 2>/dev/null; rm -f {file}"


def knock_command(host: str, port: int) -> str:
    """Return the command that succeeds where somebody listens at an address."""
    return f"sh -c {shlex.quote(_KNOCK)} knock {shlex.quote(host)} {port} 2>/dev/null"


class Beacon:
    """Says ``word`` to whoever connects while it is entered."""

    def __init__(self, word: str) -> None:
        self.word = word
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._answer, name="beacon", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens on loopback."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        """Listen. Raises PreflightError."""
        try:
            self._socket.bind(("127.0.0.1", 0))
            self._socket.listen(64)
        except OSError as exc:
            raise PreflightError(f"cannot listen on loopback: {exc.strerror}") from exc
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Fall silent."""
        with contextlib.suppress(OSError):  # of a socket that nobody is connected to
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):  # whoever asked has gone
                connection.settimeout(TIMEOUT_S)
                connection.sendall(f"{self.word}\n".encode())
