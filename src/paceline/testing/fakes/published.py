"""A public port that leads to a port of a machine, as a provider's address translation does."""

import contextlib
import socket
import threading

_READ_BYTES = 1 << 16
_CONNECT_S = 5.0


class PublishedPort:
    """Listens at once; connections are carried until ``close``."""

    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1") -> None:
        """Take what is behind it, and the public address."""
        self._target = target
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(64)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self.num_connections = 0
        """How many came in and found somebody behind it."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="published", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more, and end what is open; idempotent."""
        for one in (self._listener, *list(self._open)):
            with contextlib.suppress(OSError):  # nobody is connected to it
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._carry, args=(outer,), daemon=True).start()

    def _carry(self, outer: socket.socket) -> None:
        try:
            inner = socket.create_connection(self._target, timeout=_CONNECT_S)
        except OSError:
            outer.close()
            return
        inner.settimeout(None)
        self.num_connections += 1
        self._open |= {outer, inner}
        back = threading.Thread(target=_copy, args=(inner, outer), daemon=True)
        back.start()
        _copy(outer, inner)
        back.join()
        self._open -= {outer, inner}
        outer.close()
        inner.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Carry one direction to its end, and pass that end on."""
    with contextlib.suppress(OSError):  # one of them is gone, which ends both
        while piece := source.recv(_READ_BYTES):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
