"""Shorter ways to servers that everybody in a run knows by an address on loopback.

Through the operator's tunnels `127.0.0.1:PORT` means one server on every machine. Where this
machine knows a way that leaves the operator out, a file says so: a JSON object from such an address
to the one to dial. It is written by whoever drives the run, while the role lives; so it is read
whenever something is dialled, and a way that does not work costs no more than one try.
"""

import json
from pathlib import Path
from urllib.parse import urlsplit

ROUTES_VARIABLE = "PACELINE_ROUTES"
"""Environment variable that says where the file is."""
ROUTE_TRY_S = 3.0
"""How long a shorter way may take to answer before the long one is taken."""
_BYTES_MAX = 1 << 20


class Routes:
    """What a machine's file says at the moment; without a file every address is itself."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def of(self, endpoint: str) -> str:
        """Return the endpoint to try first; the same one where no other is known."""
        parts = urlsplit(endpoint)
        shorter = self._read().get(parts.netloc)
        return endpoint if shorter is None else parts._replace(netloc=shorter).geturl()

    def _read(self) -> dict[str, str]:
        """Return the file's ways; what cannot be read is no way, and the long one is there."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_BYTES_MAX))
        except (OSError, ValueError, RecursionError):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {name: way for name, way in pairs if isinstance(way, str)}
