"""The calls of Lambda's API, by name; what they mean is in mapping.py."""

from collections.abc import Callable, Mapping

from paceline.rental.answers import at, rows_at
from paceline.rental.backends.lambda_ import mapping
from paceline.rental.backends.lambda_.config import LambdaConfig
from paceline.rental.errors import AbsentError, GarbageError
from paceline.rental.httpapi import ALL_CALLS, Dialect, Effect, HttpApi, HttpParts


class LambdaClient:
    """One account on Lambda."""

    def __init__(
        self, config: LambdaConfig, *, key: Callable[[], str | None], parts: HttpParts
    ) -> None:
        dialect = Dialect(
            backend="lambda",
            judge=mapping.judge,
            # one a second over all, with room for one that travels faster than the last; five
            # launches a minute
            intervals_s={ALL_CALLS: 1.05, "launch": 12.0},
        )
        self._api = HttpApi(dialect, base_url=config.api_url, key=key, parts=parts)

    def instance_types(self) -> Mapping[str, object]:
        """Return type name -> type and the regions that say they have some."""
        answer = self._api.call("GET", "/instance-types", effect=Effect.READ)
        found = at(answer, "data")
        if not isinstance(found, Mapping):
            raise GarbageError("lambda: the types were answered as something else; try again")
        return found

    def launch(self, body: Mapping[str, object]) -> str:
        """Launch one machine and return its id; made once."""
        answer = self._api.call(
            "POST",
            "/instance-operations/launch",
            effect=Effect.ONCE,
            lane="launch",
            body=dict(body),
        )
        ids = at(answer, "data", "instance_ids")
        if not isinstance(ids, list) or not ids or not mapping.is_instance_id(str(ids[0])):
            raise GarbageError("lambda: the launch was answered without an id")
        return str(ids[0])

    def instance(self, instance_id: str) -> Mapping[str, object] | None:
        """Return one machine, or None where it does not exist."""
        try:
            answer = self._api.call("GET", _path(instance_id), effect=Effect.READ)
        except AbsentError:
            return None
        found = at(answer, "data")
        if not isinstance(found, Mapping):
            raise GarbageError(f"lambda: machine {instance_id} was answered as something else")
        return found

    def instances(self) -> list[Mapping[str, object]]:
        """Return every machine of the account; there are no pages."""
        answer = self._api.call("GET", "/instances", effect=Effect.READ)
        if not isinstance(at(answer, "data"), list):
            raise GarbageError("lambda: the listing answered without a list of machines")
        return rows_at(answer, "data")

    def terminate(self, instance_id: str) -> None:
        """Tell a machine to go, once; what is not seen gone afterwards is not.

        Never repeated blindly: a machine that goes already answers a second order with an error
        that looks like trouble of the provider's own. Whoever orders looks in between.
        """
        _path(instance_id)
        self._api.call(
            "POST",
            "/instance-operations/terminate",
            effect=Effect.ONCE,
            body={"instance_ids": [instance_id]},
        )

    def rename(self, instance_id: str, name: str) -> None:
        """Change a machine's name."""
        self._api.call("POST", _path(instance_id), effect=Effect.REPEATABLE, body={"name": name})

    def ssh_keys(self) -> list[Mapping[str, object]]:
        """Return the keys of the account."""
        answer = self._api.call("GET", "/ssh-keys", effect=Effect.READ)
        if not isinstance(at(answer, "data"), list):
            raise GarbageError("lambda: the ssh keys were answered as something else")
        return rows_at(answer, "data")

    def add_ssh_key(self, name: str, public_key: str) -> None:
        """Register a key; made once, since doubles break launches."""
        self._api.call(
            "POST", "/ssh-keys", effect=Effect.ONCE, body={"name": name, "public_key": public_key}
        )


def _path(instance_id: str) -> str:
    """Return a machine's path. Raises AbsentError for an id that no machine can have."""
    if not mapping.is_instance_id(instance_id):
        raise AbsentError(f"lambda has no machine {instance_id!r}")
    return f"/instances/{instance_id}"
