"""RunPod on loopback: REST v2 as documented, and the part of GraphQL that renting still meets."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from paceline.testing.fakes.cloud import COMMON_FAULTS, FakeCloud, Rental, Reply, Request

_PROBLEM = "application/problem+json"
_LIMIT_PER_MINUTE = 60
_USER_PRICE_OF_DISK = 0.10 / 720
_GPUS = (
    # id, short name, GB, $/h of one GPU: secure, community; widest pod
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.69, 0.34, 8),
    ("NVIDIA GeForce RTX 5090", "RTX 5090", 32, 0.89, 0.69, 8),
    ("NVIDIA A100 80GB PCIe", "A100 PCIe", 80, 1.64, 1.19, 8),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.89, 1.39, 8),
    ("NVIDIA H100 PCIe", "H100 PCIe", 80, 2.39, 1.99, 4),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.99, 2.69, 8),
    ("NVIDIA H100 NVL", "H100 NVL", 94, 2.79, 2.59, 8),
    ("NVIDIA H200", "H200 SXM", 141, 3.99, 3.59, 8),
    ("NVIDIA B200", "B200", 180, 5.99, 4.99, 8),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96, 1.89, 1.69, 8),
)
_FIELDS = {
    *("name", "image", "templateId", "cloud", "gpu", "cpu", "dataCenterIds", "disk", "mounts"),
    *("ports", "env", "args", "registry", "startSsh", "startJupyter", "globalNetworking"),
}
_PROSE = (
    "There are no longer any instances available with the requested specifications.",
    "This machine does not have the resources to deploy your pod. Please try a different machine",
    "no capacity for the requested GPU type",
)
_FAULTS = {
    "unknown-at-first": "a new pod is 404 for some seconds, and so is its DELETE",
    "boot-error": "a new pod ends in ERROR",
    "sold-out": "the catalogue says that nothing is available",
    "no-gpus-left": "a stopped pod cannot start: its host has given the GPUs away",
    "locked": "a pod refuses actions with 409",
}


class FakeRunpod(FakeCloud):
    """The parts of RunPod's API that renting needs."""

    name: ClassVar[str] = "runpod"
    faults_known: ClassVar[Mapping[str, str]] = {**COMMON_FAULTS, **_FAULTS}

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # the options of FakeCloud
        self.account_keys: list[str] = []
        self._num_pods = 0
        self._in_minute: list[float] = []

    def plant(self, *, label: str) -> str:
        """Have a pod that somebody made in the console."""
        return self._new_pod({"name": label, "gpu": {"id": _GPUS[0][0], "count": 1}}).instance_id

    def is_create(self, request: Request) -> bool:
        """Return whether a pod is being made, by either API."""
        if request.path == "/graphql":
            return "podFindAndDeployOnDemand" in str(request.document.get("query"))
        return (request.method, request.path) == ("POST", "/v2/pods")

    def too_many(self, request: Request) -> Reply:
        """Answer 429 with the seconds to wait."""
        detail = "rate limit exceeded for the minute window"
        reply = _problem(429, "Too Many Requests", detail)
        return Reply(
            status=429, body=reply.body, content_type=_PROBLEM, headers={"Retry-After": "3"}
        )

    def broken(self) -> Reply:
        """Answer 500."""
        return _problem(500, "Internal Server Error", "something went wrong")

    def is_too_soon(self, request: Request) -> bool:
        """Return whether sixty calls came within the last minute."""
        now_s = self.clock.monotonic()
        self._in_minute = [at_s for at_s in self._in_minute if now_s - at_s < 60]
        if self.enforces_pace and len(self._in_minute) >= _LIMIT_PER_MINUTE:
            return True
        self._in_minute.append(now_s)
        return False

    def route(self, request: Request) -> Reply:
        """Find who answers a path, and say how much of the limit is left."""
        reply = self._route(request)
        left = max(0, _LIMIT_PER_MINUTE - len(self._in_minute))
        headers = {
            "RateLimit": f'"minute";r={left};t={60 - int(self.now_s()) % 60}',
            "RateLimit-Policy": '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400',
            "X-Request-Id": f"req-{len(self.calls)}",
            **reply.headers,
        }
        return Reply(
            status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers
        )

    def _route(self, request: Request) -> Reply:
        if request.path == "/graphql":
            return self._graphql(request)
        if request.bearer != self.key and not self._is_own_key(request):
            detail = "invalid API key" if request.bearer else "missing bearer token"
            return _problem(401, "Unauthorized", detail)
        one = r"/v2/pods/([^/]+)"
        handlers: Sequence[tuple[str, str, Callable[..., Reply]]] = (
            ("GET", r"/v2/catalog/gpus", self._catalogue),
            ("POST", r"/v2/pods", self._create),
            ("GET", r"/v2/pods", self._list),
            ("GET", one, self._get),
            ("DELETE", one, self._delete),
            ("POST", one + "/action", self._act),
            ("GET", one + "/logs", self._logs),
            ("GET|PUT", r"/v2/account/ssh-keys", self._keys),
            ("GET", r"/v2/billing/pods", self._billing),
        )
        for methods, pattern, handler in handlers:
            found = re.fullmatch(pattern, request.path)
            if found and request.method in methods.split("|"):
                return handler(request, *found.groups())
        return _problem(404, "Not Found", "no such path")

    def _is_own_key(self, request: Request) -> bool:
        """Return whether a pod asks about itself with the key that is good for that alone."""
        found = re.fullmatch(r"/v2/pods/([^/]+)", request.path)
        return found is not None and request.bearer == _pod_key(found.group(1))

    def machine_environ(self, rental: Rental) -> Mapping[str, str]:
        """Return what each pod knows of itself."""
        key = _pod_key(rental.instance_id)
        return {"RUNPOD_POD_ID": rental.instance_id, "RUNPOD_API_KEY": key}

    def _catalogue(self, request: Request) -> Reply:
        query = request.query
        if query.get("include") == "AVAILABILITY" and "product" not in query:
            return _problem(400, "Bad Request", "include=AVAILABILITY requires product")
        count = int(query.get("count", "1"))
        is_sold_out = self.faults.strikes("sold-out")
        rows = []
        for gpu_id, name, memory, secure, community, widest in _GPUS:
            level = "NONE" if is_sold_out or count > widest else "HIGH" if count == 1 else "LOW"
            rows.append(
                {
                    "id": gpu_id,
                    "name": name,
                    "memory": memory,
                    "manufacturer": "Nvidia",
                    "secure": True,
                    "community": True,
                    "price": {"secure": secure, "community": community, "serverless": secure * 2},
                    "maxCount": {"secure": widest, "community": widest},
                    "availability": level,
                    "dataCenters": [{"id": "US-KS-2", "name": "Kansas", "availability": level}],
                    "cudaVersions": [{"version": "12.8", "available": True}],
                    "pool": "ADA_24",
                }
            )
        return Reply(body={"gpus": rows})

    def _create(self, request: Request) -> Reply:
        body = request.document
        unknown = sorted(set(body) - _FIELDS)
        if unknown:
            return _problem(422, "Unprocessable", "validation failed", [f"{unknown[0]}: unknown"])
        gpu = body.get("gpu")
        if not body.get("name") or not body.get("image") or not isinstance(gpu, Mapping):
            return _problem(422, "Unprocessable", "validation failed", ["name, image and gpu"])
        if self.balance_usd <= 0 or self.faults.strikes("no-balance"):
            return _problem(402, "Payment Required", "insufficient balance")
        known = {row[0]: row for row in _GPUS}
        row = known.get(str(gpu.get("id")))
        if row is None or int(str(gpu.get("count") or 1)) > row[5]:
            return _problem(400, "Bad Request", "gpu id or count is not offered")
        if self.faults.strikes("no-capacity"):
            return _problem(400, "Bad Request", self.rng.choice(_PROSE))
        rental = self._new_pod(body)
        return Reply(status=201, body=self._document(rental))

    def _new_pod(self, body: Mapping[str, object]) -> Rental:
        gpu = body["gpu"]
        asked: Mapping[str, object] = gpu if isinstance(gpu, Mapping) else {}
        row = next(row for row in _GPUS if row[0] == asked.get("id"))
        cloud = str(body.get("cloud") or "SECURE")
        count = int(str(asked.get("count") or 1))
        volume = body.get("mounts")
        persistent = volume.get("persistent") if isinstance(volume, Mapping) else None
        volume_gb = int(str(persistent["size"])) if isinstance(persistent, Mapping) else 0
        disk_gb = int(str(body.get("disk") or 20)) + volume_gb
        self._num_pods += 1
        rental = self.open_rental(
            f"k{self.rng.randrange(16**8):08x}{self._num_pods:x}",
            label=str(body.get("name") or ""),
            dph=count * (row[3] if cloud == "SECURE" else row[4]) + disk_gb * _USER_PRICE_OF_DISK,
        )
        rental.facts = {"body": body, "cloud": cloud, "gpu": {"id": row[0], "count": count}}
        self.put_gpus(rental, row[0], count=count, memory_mb=row[2] * 1024)
        env = body.get("env")
        if isinstance(env, Mapping):
            rental.public_keys = [
                str(env[name]) for name in ("PUBLIC_KEY", "SSH_PUBLIC_KEY") if env.get(name)
            ][:1]
        if body.get("startSsh"):
            rental.public_keys += self.account_keys
        if self.faults.strikes("boot-fails") or self.faults.strikes("boot-error"):
            rental.boot_failure = "ERROR"
        rental.facts["known_from_s"] = self.now_s() + (
            10.0 if self.faults.strikes("unknown-at-first") else 0.0
        )
        return rental

    def _list(self, request: Request) -> Reply:
        now_s = self.now_s()
        rows = [
            self._document(rental)
            for rental in self.rentals.values()
            if rental.ended_at is None and rental.listed_from_s <= now_s
        ]
        return Reply(body={"pods": rows})

    def _get(self, request: Request, pod_id: str) -> Reply:
        rental = self._known(pod_id)
        return _absent() if rental is None else Reply(body=self._document(rental))

    def _delete(self, request: Request, pod_id: str) -> Reply:
        rental = self._known(pod_id)
        if rental is None:
            return _absent()
        if self.faults.strikes("locked"):
            return _problem(409, "Conflict", "pod is locked")
        if not self.faults.strikes("ignored-destroy"):
            self.close_rental(rental)
        return Reply(status=204)

    def _act(self, request: Request, pod_id: str) -> Reply:
        rental = self._known(pod_id)
        if rental is None:
            return _absent()
        action = str(request.document.get("action"))
        if action not in self._actions(rental) or self.faults.strikes("locked"):
            return _problem(409, "Conflict", f"{action} is not valid in this status")
        if action == "terminate":
            self.close_rental(rental)
            return Reply(status=204)
        if action == "stop":
            self.halt(rental)
        if action == "start":
            if self.faults.strikes("no-gpus-left"):
                detail = "There are not enough free GPUs on the host machine to start this pod."
                return _problem(400, "Bad Request", detail)
            self.resume(rental)
        return Reply(body=self._document(rental))

    def _logs(self, request: Request, pod_id: str) -> Reply:
        if self._known(pod_id) is None:
            return _absent()
        lines = [f"container {pod_id} started", "sshd started"]
        tail = int(request.query.get("tail", "100"))
        events = "".join(
            f'id: {number}\ndata: {{"source":"container","line":"{line}","ts":0}}\n\n'
            for number, line in enumerate(lines[-tail:])
        )
        return Reply(body=events, content_type="text/event-stream")

    def _keys(self, request: Request) -> Reply:
        if request.method == "PUT":
            keys = request.document.get("keys")
            # the whole list is replaced: who does not read first loses keys
            self.account_keys = [str(key) for key in keys] if isinstance(keys, list) else []
        return Reply(body={"keys": self.account_keys})

    def _billing(self, request: Request) -> Reply:
        now_s = self.now_s()
        records = [
            {
                "podId": rental.instance_id,
                "startTime": _iso(rental.created_at),
                "endTime": _iso(rental.ended_at or now_s),
                "totalAmount": rental.dph * ((rental.ended_at or now_s) - rental.created_at) / 3600,
            }
            for rental in self.rentals.values()
            if rental.instance_id == request.query.get("podId", rental.instance_id)
        ]
        return Reply(body={"records": records, "metadata": {"totals": {}}})

    def _graphql(self, request: Request) -> Reply:
        """Answer what the older clients ask; refusals come with status 200."""
        if request.query.get("api_key", request.bearer) != self.key:
            return Reply(status=401, body={"errors": [{"message": "Unauthorized"}]})
        query = str(request.document.get("query"))
        answers: Sequence[tuple[str, Callable[[str], object]]] = (
            ("podFindAndDeployOnDemand", self._graphql_deploy),
            ("podTerminate", self._graphql_terminate),
            ("podStop", self._graphql_stop),
            ("podResume", self._graphql_resume),
            ("gpuTypes", self._graphql_gpus),
            ("pods", self._graphql_pods),
            ("pod(", self._graphql_pod),
            ("clientBalance", self._graphql_balance),
            ("pubKey", lambda _query: {"myself": {"id": "user_1", "pubKey": ""}}),
            ("myself", lambda _query: {"myself": {"id": "user_1"}}),
        )
        for word, answer in answers:
            if word in query:
                try:
                    return Reply(body={"data": answer(query)})
                except LookupError as exc:
                    return Reply(body={"errors": [{"message": str(exc.args[0])}], "data": None})
        return Reply(status=400, body={"errors": [{"message": "unknown query"}]})

    def _graphql_balance(self, query: str) -> object:
        spent = sum(rental.dph for rental in self.rentals.values() if rental.ended_at is None)
        account = {"clientBalance": self.balance_usd, "currentSpendPerHr": spent}
        return {"myself": {"id": "user_1", "spendLimit": 80, **account}}

    def _graphql_gpus(self, query: str) -> object:
        wanted = _argument(query, "id")
        rows = [
            {
                "id": row[0],
                "displayName": row[1],
                "memoryInGb": row[2],
                "maxGpuCount": row[5],
                "securePrice": row[3],
                "communityPrice": row[4],
                "manufacturer": "Nvidia",
                "secureCloud": True,
                "communityCloud": True,
                "lowestPrice": {"minimumBidPrice": row[4] / 2, "uninterruptablePrice": row[4]},
            }
            for row in _GPUS
            if not wanted or row[0] == wanted
        ]
        return {"gpuTypes": rows}

    def _graphql_deploy(self, query: str) -> object:
        if self.faults.strikes("no-capacity"):
            raise LookupError(self.rng.choice(_PROSE))
        gpu_id = _argument(query, "gpuTypeId")
        if gpu_id not in {row[0] for row in _GPUS}:
            raise LookupError("GPU type not found")
        count = re.search(r"gpuCount:\s*(\d+)", query)
        key = re.search(r'key:\s*"PUBLIC_KEY",\s*value:\s*"([^"]*)"', query)
        rental = self._new_pod(
            {
                "name": _argument(query, "name"),
                "image": _argument(query, "imageName"),
                "gpu": {"id": gpu_id, "count": int(count.group(1)) if count else 1},
                "ports": ["22/tcp"],
                "env": {"PUBLIC_KEY": key.group(1)} if key else {},
                "startSsh": True,
            }
        )
        return {"podFindAndDeployOnDemand": self._graphql_document(rental)}

    def _graphql_terminate(self, query: str) -> object:
        rental = self._known(_argument(query, "podId"))
        if rental is None:
            raise LookupError("pod not found to terminate")
        self.close_rental(rental)
        return {"podTerminate": None}

    def _graphql_stop(self, query: str) -> object:
        rental = self._known(_argument(query, "podId"))
        if rental is None:
            raise LookupError("pod not found to stop")
        self.halt(rental)
        return {"podStop": self._graphql_document(rental)}

    def _graphql_resume(self, query: str) -> object:
        rental = self._known(_argument(query, "podId"))
        if rental is None:
            raise LookupError("pod not found to resume")
        self.resume(rental)
        return {"podResume": self._graphql_document(rental)}

    def _graphql_pods(self, query: str) -> object:
        alive = [rental for rental in self.rentals.values() if rental.ended_at is None]
        return {"myself": {"pods": [self._graphql_document(rental) for rental in alive]}}

    def _graphql_pod(self, query: str) -> object:
        rental = self._known(_argument(query, "podId"))
        return {"pod": None if rental is None else self._graphql_document(rental)}

    def _graphql_document(self, rental: Rental) -> dict[str, object]:
        row = self._document(rental)
        direct = row["ssh"]["direct"] if isinstance(row["ssh"], dict) else None
        port = isinstance(direct, dict) and {
            "ip": direct["host"],
            "isIpPublic": True,
            "privatePort": 22,
            "publicPort": direct["port"],
            "type": "tcp",
        }
        words = {"EXITED": "EXITED", "TERMINATED": "TERMINATED"}
        return {
            "id": rental.instance_id,
            "name": rental.label,
            "desiredStatus": words.get(str(row["status"]), "RUNNING"),
            "imageName": row["image"],
            "costPerHr": rental.dph,
            "gpuCount": (rental.facts["gpu"] or {}).get("count"),  # type: ignore[attr-defined]
            "machine": {"gpuDisplayName": "GPU", "podHostId": f"{rental.instance_id}-64411eb2"},
            "machineId": "m1",
            "env": [],
            "runtime": {"uptimeInSeconds": 1, "ports": [port], "gpus": []} if port else None,
        }

    def _known(self, pod_id: str) -> Rental | None:
        rental = self.rentals.get(pod_id)
        is_there = rental is not None and rental.ended_at is None
        if not is_there or rental is None:
            return None
        return rental if self.now_s() >= float(str(rental.facts["known_from_s"])) else None

    def _word(self, rental: Rental) -> str:
        if rental.ended_at is not None:
            return "TERMINATED"
        if rental.is_stopped:
            return "EXITED"
        if rental.boot_failure is not None:
            return "ERROR"
        share = self.age_s(rental) / self.boot_s if self.boot_s else 1.0
        if share < 0.3:
            return "PROVISIONING"
        return "STARTING" if share < 0.6 or not rental.boots else "RUNNING"

    def _actions(self, rental: Rental) -> list[str]:
        word = self._word(rental)
        actions = {"EXITED": ["start", "terminate"], "RUNNING": ["stop", "restart", "terminate"]}
        return actions.get(word, ["stop", "terminate"])

    def _document(self, rental: Rental) -> dict[str, object]:
        body = rental.facts["body"]
        given: Mapping[str, object] = body if isinstance(body, Mapping) else {}
        word = self._word(rental)
        ports = given.get("ports")
        has_ssh = isinstance(ports, list) and "22/tcp" in ports
        direct = None
        published: list[dict[str, object]] = []
        if word == "RUNNING" and has_ssh and self.is_up(rental):
            host, port = self.address_of(rental)
            published = [_published(22, host, port)]
            for other in _tcp_ports(ports):
                published.append(_published(other, *self.published(rental, other)))
            direct = {
                "host": host,
                "port": port,
                "username": "root",
                "command": f"ssh root@{host} -p {port}",
            }
        is_running = word == "RUNNING"
        return {
            "id": rental.instance_id,
            "name": rental.label,
            "status": word,
            "actions": self._actions(rental),
            "image": given.get("image"),
            "args": "",
            "disk": given.get("disk"),
            "mounts": given.get("mounts") or {},
            "ports": ports or [],
            "env": given.get("env") or {},
            "registry": None,
            "gpu": rental.facts["gpu"],
            "cloud": rental.facts["cloud"],
            "dataCenterId": "US-KS-2" if is_running else None,
            "cudaVersion": "12.8" if is_running else None,
            "ssh": {"proxy": None, "direct": direct},
            "template": None,
            "cost": 0.0 if word in ("EXITED", "TERMINATED") else rental.dph,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": 1, "gpus": [], "ports": published} if is_running else None,
            "createdAt": _iso(rental.created_at),
            "startedAt": _iso(rental.started_at) if is_running else None,
        }


def _tcp_ports(ports: object) -> list[int]:
    """Return the TCP ports that a create call asks for beside ssh."""
    names = [str(name) for name in ports] if isinstance(ports, list) else []
    found = [name.removesuffix("/tcp") for name in names if name.endswith("/tcp")]
    return [int(name) for name in found if name.isdecimal() and name != "22"]


def _published(inside: int, host: str, outside: int) -> dict[str, object]:
    return {"private": inside, "public": outside, "type": "tcp", "ip": host}


def _argument(query: str, name: str) -> str:
    found = re.search(rf'\b{name}:\s*"([^"]*)"', query)
    return found.group(1) if found else ""


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def _absent() -> Reply:
    return _problem(404, "Not Found", "pod not found")


def _pod_key(pod_id: str) -> str:
    """Return the key that a pod has for itself alone."""
    return f"{pod_id}-key"


def _problem(status: int, title: str, detail: str, errors: Sequence[str] = ()) -> Reply:
    body: dict[str, object] = {"title": title, "status": status, "detail": detail}
    if errors:
        body["errors"] = list(errors)
    return Reply(status=status, body=body, content_type=_PROBLEM)
