"""The calls of RunPod's API, by name; what they mean is in mapping.py."""

from collections.abc import Callable, Mapping

from paceline.rental.answers import at, rows_at
from paceline.rental.backends.runpod import mapping
from paceline.rental.backends.runpod.config import RunpodConfig
from paceline.rental.errors import AbsentError, GarbageError
from paceline.rental.httpapi import ALL_CALLS, Dialect, Effect, HttpApi, HttpParts

_BALANCE_QUERY = "query { myself { id clientBalance currentSpendPerHr } }"

_BURST = 12
_INTERVAL_S = 1.3
"""60 requests a minute and 3000 an hour for the whole account, counted in windows: 12 at once
and 46 after them keep to the one, 2770 to the other."""


class RunpodClient:
    """One account on RunPod."""

    def __init__(
        self, config: RunpodConfig, *, key: Callable[[], str | None], parts: HttpParts
    ) -> None:
        dialect = Dialect(
            backend="runpod",
            judge=mapping.judge,
            intervals_s={ALL_CALLS: _INTERVAL_S},
            bursts={ALL_CALLS: _BURST},
        )
        self._api = HttpApi(dialect, base_url=config.api_url, key=key, parts=parts)

    def gpus(self, *, cloud: str, count: int) -> list[Mapping[str, object]]:
        """Return the catalogue with prices, and what is available in that width."""
        params = {
            "include": "AVAILABILITY",
            "product": "POD",
            "cloud": cloud,
            "count": str(count),
        }
        answer = self._api.call("GET", "/v2/catalog/gpus", effect=Effect.READ, params=params)
        if not isinstance(at(answer, "gpus"), list):
            raise GarbageError("runpod: the catalogue answered without a list of GPUs; try again")
        return rows_at(answer, "gpus")

    def create(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """Create a pod; made once."""
        answer = self._api.call("POST", "/v2/pods", effect=Effect.ONCE, body=dict(body))
        if not isinstance(answer, Mapping) or not mapping.is_instance_id(str(answer.get("id"))):
            raise GarbageError("runpod: the create call was answered without an id")
        return answer

    def pod(self, pod_id: str) -> Mapping[str, object] | None:
        """Return one pod, or None where it does not exist, or not yet."""
        try:
            answer = self._api.call("GET", _path(pod_id), effect=Effect.READ)
        except AbsentError:
            return None
        if not isinstance(answer, Mapping):
            raise GarbageError(f"runpod: pod {pod_id} was answered as something else")
        return answer

    def pods(self) -> list[Mapping[str, object]]:
        """Return every pod of the account; members of clusters too, since they bill."""
        answer = self._api.call(
            "GET", "/v2/pods", effect=Effect.READ, params={"includeClusterPods": "true"}
        )
        if not isinstance(at(answer, "pods"), list):
            raise GarbageError("runpod: the listing answered without a list of pods")
        return rows_at(answer, "pods")

    def act(self, pod_id: str, action: str) -> None:
        """Move a pod: ``stop``, ``start``."""
        self._api.call(
            "POST", f"{_path(pod_id)}/action", effect=Effect.REPEATABLE, body={"action": action}
        )

    def delete(self, pod_id: str) -> None:
        """Terminate a pod. Raises AbsentError where it does not exist, or not yet."""
        self._api.call("DELETE", _path(pod_id), effect=Effect.REPEATABLE)

    def log_events(self, pod_id: str, *, num_lines: int) -> str:
        """Return the log as a text of server-sent events."""
        return self._api.text(f"{_path(pod_id)}/logs?tail={min(num_lines, 5000)}")

    def billing(self, pod_id: str) -> list[Mapping[str, object]]:
        """Return what was billed for a pod."""
        answer = self._api.call(
            "GET",
            "/v2/billing/pods",
            effect=Effect.READ,
            params={"podId": pod_id, "bucketSize": "day"},
        )
        return rows_at(answer, "records")

    def account(self) -> Mapping[str, object]:
        """Return who we are, with the balance; only GraphQL tells."""
        answer = self._api.call(
            "POST", "/graphql", effect=Effect.READ, body={"query": _BALANCE_QUERY}
        )
        found = at(answer, "data", "myself")
        return found if isinstance(found, Mapping) else {}


def _path(pod_id: str) -> str:
    """Return a pod's path. Raises AbsentError for an id that no pod can have."""
    if not mapping.is_instance_id(pod_id):
        raise AbsentError(f"runpod has no pod {pod_id!r}")
    return f"/v2/pods/{pod_id}"
