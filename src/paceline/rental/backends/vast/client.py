"""The calls of Vast's HTTP API, by name; what they mean is in mapping.py."""

import json
from collections.abc import Callable, Mapping

from paceline.rental.answers import at, rows_at, text_at
from paceline.rental.backends.vast import mapping
from paceline.rental.backends.vast.config import VastConfig
from paceline.rental.errors import AbsentError, GarbageError
from paceline.rental.httpapi import ALL_CALLS, Dialect, Effect, HttpApi, HttpParts

_PAGE_ROWS = 25
"""More than this the listing refuses."""
_NUM_PAGES_MAX = 400

_INTERVALS_S = {
    # "threshold" of the provider's own 429s, per endpoint and identity
    ALL_CALLS: 0.0,
    "create": 4.5,
    "get": 2.0,
    "list": 1.0,
    "change": 1.0,
    "destroy": 3.0,
    "keys": 1.0,
    "charges": 1.0,
    "search": 6.0,  # ten a minute
}


class VastClient:
    """One account on Vast."""

    def __init__(
        self, config: VastConfig, *, key: Callable[[], str | None], parts: HttpParts
    ) -> None:
        dialect = Dialect(
            backend="vast",
            judge=mapping.judge,
            intervals_s=_INTERVALS_S,
            open_lanes=frozenset({"search"}),
        )
        self._api = HttpApi(dialect, base_url=config.api_url, key=key, parts=parts)

    def search(self, query: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Return the offers that fit; reads only, though it is a POST."""
        answer = self._api.call(
            "POST", "/api/v0/bundles/", effect=Effect.READ, lane="search", body=dict(query)
        )
        if not isinstance(at(answer, "offers"), list):
            raise GarbageError("vast: the search answered without a list of offers; try again")
        return rows_at(answer, "offers")

    def create(self, offer_id: str, body: Mapping[str, object]) -> str:
        """Rent an offer and return the machine's id; made once."""
        answer = self._api.call(
            "PUT",
            f"/api/v0/asks/{offer_id}/",
            effect=Effect.ONCE,
            lane="create",
            body=dict(body),
        )
        instance_id = mapping.created_id(answer)
        if instance_id is None:
            raise GarbageError("vast: the create call was answered without new_contract")
        return instance_id

    def instance(self, instance_id: str) -> Mapping[str, object] | None:
        """Return one machine, or None where it does not exist."""
        try:
            answer = self._api.call("GET", _path(instance_id), effect=Effect.READ, lane="get")
        except AbsentError:
            return None
        if not isinstance(answer, Mapping) or "instances" not in answer:
            raise GarbageError(f"vast: machine {instance_id} was answered without `instances`")
        found = answer["instances"]
        return found if isinstance(found, Mapping) else None

    def instances(self) -> list[Mapping[str, object]]:
        """Return every machine of the account, page by page."""
        rows: list[Mapping[str, object]] = []
        seen: set[str] = set()
        params = {
            "limit": str(_PAGE_ROWS),
            "order_by": json.dumps([{"col": "id", "dir": "asc"}]),
            "select_filters": "{}",
        }
        for _ in range(_NUM_PAGES_MAX):
            answer = self._api.call(
                "GET", "/api/v1/instances/", effect=Effect.READ, lane="list", params=params
            )
            if not isinstance(at(answer, "instances"), list):
                raise GarbageError("vast: the listing answered without a list of machines")
            rows += rows_at(answer, "instances")
            token = text_at(answer, "next_token")
            if not token:
                return rows
            if token in seen:
                break  # a cursor that is not understood starts again at the first page
            seen.add(token)
            params["after_token"] = token
        raise GarbageError("vast: the listing does not end; look at the provider's console")

    def change(self, instance_id: str, body: Mapping[str, object]) -> None:
        """Set a machine's ``state`` or ``label``."""
        self._api.call(
            "PUT",
            _path(instance_id),
            effect=Effect.REPEATABLE,
            lane="change",
            body=dict(body),
        )

    def destroy(self, instance_id: str) -> None:
        """Destroy a machine. Raises AbsentError where it does not exist."""
        self._api.call(
            "DELETE",
            _path(instance_id),
            effect=Effect.REPEATABLE,
            lane="destroy",
            body={},
        )

    def attach_key(self, instance_id: str, public_key: str) -> None:
        """Let a key into one machine for as long as it lives."""
        self._api.call(
            "POST",
            f"{_path(instance_id)}ssh/",
            effect=Effect.REPEATABLE,
            lane="keys",
            body={"ssh_key": public_key},
        )

    def request_logs(self, instance_id: str, *, num_lines: int) -> str:
        """Ask for a machine's log and return the address where it will be."""
        answer = self._api.call(
            "PUT",
            f"/api/v0/instances/request_logs/{instance_id}",
            effect=Effect.READ,
            lane="change",
            body={"tail": str(num_lines)},
        )
        address = text_at(answer, "result_url")
        if not address.startswith(("https://", "http://127.0.0.1:")):
            raise GarbageError("vast: the log was answered without an address")
        return address

    def text(self, address: str) -> str:
        """Return what is at an address that the provider named."""
        return self._api.text(address)

    def user(self) -> Mapping[str, object]:
        """Return who we are, with the credit left."""
        answer = self._api.call("GET", "/api/v0/users/current/", effect=Effect.READ, lane="user")
        return answer if isinstance(answer, Mapping) else {}

    def charges(self, *, since_s: float, until_s: float) -> list[Mapping[str, object]]:
        """Return what was billed between two moments; both are compulsory."""
        bounds = {"day": {"gte": int(since_s), "lte": int(until_s)}}
        params = {"select_filters": json.dumps(bounds), "format": "table", "limit": "1000"}
        answer = self._api.call(
            "GET", "/api/v0/charges/", effect=Effect.READ, lane="charges", params=params
        )
        return rows_at(answer, "results")


def _path(instance_id: str) -> str:
    """Return a machine's path. Raises AbsentError for an id that no machine can have."""
    if not mapping.is_instance_id(instance_id):
        raise AbsentError(f"vast has no machine {instance_id!r}")
    return f"/api/v0/instances/{instance_id}/"
