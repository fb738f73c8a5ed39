"""Vast.ai on loopback: a marketplace with offers that are rented once, and its many quirks."""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from paceline.testing.fakes.cloud import COMMON_FAULTS, FakeCloud, Rental, Reply, Request

_PAGE_ROWS_MAX = 25
_DAY_S = 86_400.0
_OPERATORS: Mapping[str, Callable[[object, object], bool]] = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gt": operator.gt,  # type: ignore[dict-item]  # rows hold what can be compared
    "gte": operator.ge,  # type: ignore[dict-item]
    "lt": operator.lt,  # type: ignore[dict-item]
    "lte": operator.le,  # type: ignore[dict-item]
    "in": lambda value, wanted: value in wanted,  # type: ignore[operator]
    "notin": lambda value, wanted: value not in wanted,  # type: ignore[operator]
}
_CONTROLS = {
    "order",
    "type",
    "limit",
    "allocated_storage",
    "disable_bundling",
    "q",
    "select_cols",
    "sort_option",
    "resource_type",
}
_PACES = {
    "create": 4.5,
    "get": 2.0,
    "list": 1.0,
    "change": 1.0,
    "destroy": 3.0,
    "keys": 1.0,
    "charges": 1.0,
    "search": 6.0,
}
_GPUS = (
    # name, MiB per GPU, $/h of one GPU, compute capability
    ("RTX 4090", 24_564, 0.31, 890),
    ("RTX 5090", 32_607, 0.52, 1200),
    ("A100 PCIE", 40_960, 0.61, 800),
    ("A100 SXM4", 81_920, 0.93, 800),
    ("H100 SXM", 81_559, 2.1, 900),
    ("H100 NVL", 95_830, 1.9, 900),
    ("H200", 143_771, 2.6, 900),
    ("B200", 183_359, 3.9, 1000),
)
_WIDTHS = (1, 2, 4, 8)

_FAULTS = {
    "offer-gone": "a create finds its offer taken, with one of two answers",
    "low-bid": "a create is refused and leaves a stopped machine, named in the refusal",
    "success-false": "a create answers 200 with success false",
    "outbid": "a rented machine is stopped by a higher bid",
    "offline": "a machine's host loses contact",
    "null-when-gone": "a machine that is gone is answered 200 with null instead of 404",
}


class FakeVast(FakeCloud):
    """The parts of Vast's API that renting needs."""

    name: ClassVar[str] = "vast"
    faults_known: ClassVar[Mapping[str, str]] = {**COMMON_FAULTS, **_FAULTS}

    rate_limit_style = 0
    """Which of the three bodies a 429 has; each comes in turn."""
    is_old_list_gone = True

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # the options of FakeCloud
        self.offers: dict[str, dict[str, object]] = {}
        self.account_keys: list[str] = []
        self._next_id = 31_337_000
        self._logs: dict[str, str] = {}
        for gpu in _GPUS:
            for count in _WIDTHS:
                for _ in range(3):
                    self.add_offer(*gpu, count=count)

    def add_offer(
        self, gpu_name: str, gpu_ram: int, gpu_dph: float, compute_cap: int, *, count: int
    ) -> dict[str, object]:
        """Put one machine on the market."""
        self._next_id += 1
        dph = round(gpu_dph * count * self.rng.uniform(0.9, 1.6), 4)
        row: dict[str, object] = {
            "id": self._next_id,
            "ask_contract_id": self._next_id,
            "machine_id": 4000 + self._next_id % 1000,
            "host_id": 70 + self._next_id % 9,
            "gpu_name": gpu_name,
            "num_gpus": count,
            "gpu_ram": gpu_ram,
            "gpu_total_ram": gpu_ram * count,
            "cpu_ram": 64_000 * count,
            "cpu_cores": 16 * count,
            "cpu_cores_effective": 16.0 * count,
            "disk_space": 2000.0,
            "inet_down": round(self.rng.uniform(600, 5000), 1),
            "inet_up": 640.8,
            "inet_down_cost": 0.002,
            "inet_up_cost": 0.003,
            "reliability2": round(self.rng.uniform(0.975, 0.999), 4),
            "dph_base": dph,
            "min_bid": round(dph * 0.5, 4),
            "storage_cost": 0.15,
            "duration": 30 * _DAY_S,
            "end_date": self.now_s() + 30 * _DAY_S,
            "compute_cap": compute_cap,
            "cuda_max_good": 12.8,
            "driver_version": "570.86.15",
            "bw_nvlink": 0.0,
            "pcie_bw": 22.1,
            "geolocation": "Oslo, NO",
            "verification": "verified",
            "verified": True,
            "datacenter": False,
            "external": False,
            "hosting_type": 0,
            "direct_port_count": 40,
            "static_ip": True,
            "rentable": True,
            "rented": False,
            "is_bid": False,
            "score": round(100 / dph, 2),
        }
        self.offers[str(self._next_id)] = row
        return row

    def plant(self, *, label: str) -> str:
        """Rent the first offer for somebody."""
        body = {"image": "x", "label": label}
        request = Request(method="PUT", path="", body=json.dumps(body).encode())
        offer = self.add_offer(*_GPUS[0], count=1)
        reply = self._create(request, str(offer["id"]))
        return str(reply.body["new_contract"]) if isinstance(reply.body, dict) else ""

    def is_create(self, request: Request) -> bool:
        """Return whether an offer is being rented."""
        return request.method == "PUT" and request.path.startswith("/api/v0/asks/")

    def pace_of(self, request: Request) -> tuple[str, float] | None:
        """Return the threshold of an endpoint."""
        lane = _lane(request)
        return (lane, _PACES[lane]) if lane in _PACES else None

    def too_many(self, request: Request) -> Reply:
        """Answer 429 in one of the three known styles, with and without Retry-After."""
        text = "API requests too frequent endpoint threshold=2.0"
        bodies: Sequence[object] = (
            {"detail": text},
            {"success": False, "error": "rate_limit_exceeded", "msg": text},
            "API requests too frequent",
        )
        style = self.rate_limit_style % len(bodies)
        self.rate_limit_style += 1
        headers = {"Retry-After": "2"} if style == 1 else {}
        return Reply(status=429, body=bodies[style], headers=headers)

    def broken(self) -> Reply:
        """Answer 500."""
        return Reply(status=500, body={"success": False, "error": "server_error", "msg": "oops"})

    def advance(self) -> None:
        """End contracts whose host's time is up."""
        for rental in self.rentals.values():
            if rental.ended_at is None and self.now_s() >= float(str(rental.facts["end_date"])):
                rental.is_stopped = True

    def route(self, request: Request) -> Reply:
        """Find who answers a path."""
        if request.path.startswith("/logs/"):
            return self._log_file(request.path.removeprefix("/logs/"))
        handlers: Sequence[tuple[str, str, Callable[..., Reply]]] = (
            ("POST|PUT", r"/api/v0/(?:bundles|search/asks)/", self._search),
            ("GET", r"/api/v0/gpu_names/unique/", self._gpu_names),
        )
        for methods, pattern, handler in handlers:
            if request.method in methods.split("|") and re.fullmatch(pattern, request.path):
                return handler(request)
        key = request.query.get("api_key", request.bearer)
        if key != self.key and not self._is_own_key(request, key):
            return self._bad_key(request)
        for methods, pattern, handler in self._private():
            found = re.fullmatch(pattern, request.path)
            if request.method in methods.split("|") and found:
                return handler(request, *found.groups())
        return _refuse(404, "not_found", f"no such endpoint {request.path}")

    def _is_own_key(self, request: Request, key: str) -> bool:
        """Return whether a machine asks about itself with the key that is good for that alone."""
        found = re.fullmatch(r"/api/v0/instances/(\d+)/", request.path)
        rental = self.rentals.get(found.group(1)) if found else None
        return rental is not None and key == rental.facts.get("instance_api_key")

    def machine_environ(self, rental: Rental) -> Mapping[str, str]:
        """Return what each container knows of itself."""
        key = str(rental.facts.get("instance_api_key"))
        return {"CONTAINER_ID": rental.instance_id, "CONTAINER_API_KEY": key}

    def _private(self) -> Sequence[tuple[str, str, Callable[..., Reply]]]:
        one = r"/api/v0/instances/(\d+)/"
        return (
            ("PUT", r"/api/v0/asks/(\d+)/", self._create),
            ("GET", one, self._get),
            ("PUT", one, self._change),
            ("DELETE", one, self._destroy),
            ("GET", r"/api/v1/instances/", self._list),
            ("GET", r"/api/v0/instances/?", self._old_list),
            ("POST", one + r"ssh/", self._attach),
            ("PUT", r"/api/v0/instances/bid_price/(\d+)/", self._bid),
            ("PUT", r"/api/v0/instances/request_logs/(\d+)/?", self._request_logs),
            ("GET", r"/api/v0/users/current/?", self._user),
            ("GET", r"/api/v0/charges/", self._charges),
            ("POST|GET", r"/api/v0/ssh/", self._account_keys),
        )

    def _bad_key(self, request: Request) -> Reply:
        """Refuse a key: on many paths with 404, which is not what it looks like."""
        status = 404 if _lane(request) in ("create", "charges") else 401
        return _refuse(status, "auth_error", "Invalid user key")

    def _search(self, request: Request) -> Reply:
        query = dict(request.document)
        inner = query.get("q")
        if isinstance(inner, dict):
            query = dict(inner)
        storage_gb = float(str(query.get("allocated_storage") or 8.0))
        is_bid = query.get("type") == "bid"
        rows = [self._priced(row, storage_gb, is_bid=is_bid) for row in self.offers.values()]
        filters = {name: ops for name, ops in query.items() if name not in _CONTROLS}
        for name, ops in filters.items():
            if not isinstance(ops, dict) or not set(ops) <= set(_OPERATORS):
                return _refuse(400, "invalid_request", f"{name} is not a valid search key")
            rows = [row for row in rows if _fits(row, name, ops)]
        orders = query.get("order") or [["score", "desc"]]
        for name, way in reversed(list(orders)):  # type: ignore[call-overload]  # JSON
            rows.sort(key=lambda row: float(str(row.get(name) or 0.0)), reverse=way == "desc")
        return Reply(body={"offers": rows[: int(str(query.get("limit") or 64))]})

    def _priced(
        self, row: Mapping[str, object], storage_gb: float, *, is_bid: bool
    ) -> dict[str, object]:
        base = float(str(row["min_bid" if is_bid else "dph_base"]))
        total = base + float(str(row["storage_cost"])) * storage_gb / 720
        return {**row, "dph_base": base, "dph_total": round(total, 6), "is_bid": is_bid}

    def _gpu_names(self, request: Request) -> Reply:
        return Reply(body={"gpu_names": sorted({str(row["gpu_name"]) for row in self._rows()})})

    def _rows(self) -> list[dict[str, object]]:
        return list(self.offers.values())

    def _create(self, request: Request, offer_id: str) -> Reply:
        row = self.offers.get(offer_id)
        body = request.document
        refusal = self._refused_create(row, offer_id, body)
        if refusal is not None or row is None:
            return refusal or self._gone(offer_id)
        self.offers.pop(offer_id)
        price = body.get("price")
        disk_gb = float(str(body.get("disk") or 8))
        base = float(str(price)) if price is not None else float(str(row["dph_base"]))
        self._next_id += 1
        rental = self.open_rental(
            str(self._next_id),
            label=str(body.get("label") or ""),
            dph=base + float(str(row["storage_cost"])) * disk_gb / 720,
        )
        rental.facts = {
            "row": row,
            "is_bid": price is not None,
            "image": body.get("image"),
            "runtype": body.get("runtype") or "ssh",
            "end_date": row["end_date"],
            "instance_api_key": f"{rental.instance_id}-key",
            "ports": _published_in(body.get("env")),
        }
        self.put_gpus(
            rental,
            str(row["gpu_name"]),
            count=int(str(row["num_gpus"])),
            memory_mb=float(str(row["gpu_ram"])),
        )
        rental.public_keys = [*self.account_keys, *_keys_in(str(body.get("onstart") or ""))]
        if self.faults.strikes("boot-fails"):
            rental.boot_failure = "Error response from daemon: manifest unknown"
        if price is not None and float(str(price)) < float(str(row["min_bid"])):
            return self._low_bid(rental)
        if self.faults.strikes("low-bid"):
            return self._low_bid(rental)
        return Reply(
            body={
                "success": True,
                "new_contract": int(rental.instance_id),
                "instance_api_key": rental.facts["instance_api_key"],
            }
        )

    def _refused_create(
        self, row: Mapping[str, object] | None, offer_id: str, body: Mapping[str, object]
    ) -> Reply | None:
        if row is None or self.faults.strikes("offer-gone") or self.faults.strikes("no-capacity"):
            self.offers.pop(offer_id, None)
            return self._gone(offer_id)
        if self.faults.strikes("success-false"):
            return Reply(body={"success": False, "error": "unavailable", "msg": "try another"})
        if self.balance_usd <= 0 or self.faults.strikes("no-balance"):
            return _refuse(400, "missing_billing", "Your account lacks credit")
        if not body.get("image"):
            return _refuse(400, "invalid_args", "error 400/3467: Invalid args: image is required")
        if len(str(body.get("onstart") or "")) > 4048 or len(str(body.get("label") or "")) > 256:
            return _refuse(400, "invalid_args", "error 400/3467: Invalid args: too long")
        return None

    def _gone(self, offer_id: str) -> Reply:
        if self.rng.random() < 0.5:
            text = f"error 404/3603: no_such_ask Instance type by id {offer_id} is not available."
            return _refuse(404, "invalid_args", text)
        text = f"error 410/3907: no_such_ask Instance type {offer_id} is no longer available."
        return _refuse(410, "no_such_ask", text)

    def _low_bid(self, rental: Rental) -> Reply:
        rental.is_stopped = True
        body = {
            "success": False,
            "error": "bid_too_low",
            "msg": "your bid is below the current one",
            "new_contract": int(rental.instance_id),
        }
        return Reply(status=400, body=body)

    def _get(self, request: Request, instance_id: str) -> Reply:
        rental = self._alive(instance_id)
        if rental is None:
            if self.faults.strikes("null-when-gone") or int(instance_id) % 2:
                return Reply(body={"instances": None})
            return _refuse(404, "no_such_instance", f"Instance {instance_id} not found.")
        return Reply(body={"instances": self._document(rental)})

    def _list(self, request: Request) -> Reply:
        limit = int(request.query.get("limit", "5"))
        if limit > _PAGE_ROWS_MAX:
            return _refuse(400, "invalid_request", f"limit must be at most {_PAGE_ROWS_MAX}")
        limit = limit if limit > 0 else 5
        filters = json.loads(request.query.get("select_filters") or "{}")
        now_s = self.now_s()
        rows = []
        for rental in self.rentals.values():
            if rental.ended_at is None and rental.listed_from_s <= now_s:
                row = self._document(rental)
                if all(_fits(row, name, ops) for name, ops in filters.items()):
                    rows.append(row)
        token = request.query.get("after_token", "")
        if token and not token.startswith("after-"):
            return _refuse(400, "invalid_token", "bad cursor")
        rest = [row for row in rows if int(str(row["id"])) > int(token[6:] or 0)]
        rest.sort(key=lambda row: int(str(row["id"])))
        page = rest[:limit]
        return Reply(
            body={
                "success": True,
                "instances_found": len(page),
                "total_instances": len(rows),
                "label_counts": {},
                "next_token": f"after-{page[-1]['id']}" if len(rest) > limit else None,
                "instances": page,
            }
        )

    def _old_list(self, request: Request) -> Reply:
        text = "/api/v0/instances/ is deprecated. Use /api/v1/instances/ instead."
        return _refuse(410, "deprecated_endpoint", text)

    def _change(self, request: Request, instance_id: str) -> Reply:
        rental = self._alive(instance_id)
        if rental is None:
            return _refuse(404, "no_such_instance", f"Instance {instance_id} not found.")
        body = request.document
        if "label" in body:
            rental.label = str(body["label"])
        if body.get("state") == "stopped":
            self.halt(rental)
        if body.get("state") == "running":
            if self.balance_usd <= 0:
                return _refuse(400, "missing_billing", "Your account lacks credit")
            self.resume(rental)
        return Reply(body={"success": True})

    def _bid(self, request: Request, instance_id: str) -> Reply:
        rental = self._alive(instance_id)
        if rental is None:
            return _refuse(404, "no_such_instance", f"Instance {instance_id} not found.")
        rental.dph = float(str(request.document.get("price") or rental.dph))
        return Reply(body={"success": True})

    def _destroy(self, request: Request, instance_id: str) -> Reply:
        rental = self._alive(instance_id)
        if rental is None:
            return _refuse(404, "no_such_instance", f"Instance {instance_id} not found.")
        if not self.faults.strikes("ignored-destroy"):
            self.close_rental(rental)
        return Reply(body={"success": True})

    def _attach(self, request: Request, instance_id: str) -> Reply:
        rental = self._alive(instance_id)
        if rental is None:
            return _refuse(404, "no_such_instance", f"Instance {instance_id} not found.")
        rental.public_keys.append(str(request.document.get("ssh_key") or ""))
        return Reply(body={"success": True})

    def _account_keys(self, request: Request) -> Reply:
        if request.method == "POST":
            self.account_keys.append(str(request.document.get("ssh_key") or ""))
            key = {"id": len(self.account_keys), "public_key": self.account_keys[-1]}
            return Reply(body={"success": True, "key": key})
        return Reply(body=[{"id": i, "key": key} for i, key in enumerate(self.account_keys, 1)])

    def _request_logs(self, request: Request, instance_id: str) -> Reply:
        if self._alive(instance_id) is None:
            return _refuse(404, "invalid_id", "no such instance")
        self._logs[instance_id] = ""
        host = request.headers.get("host", "127.0.0.1")
        scheme = "http" if host.startswith("127.0.0.1") else "https"
        address = f"{scheme}://{host}/logs/{instance_id}"
        return Reply(body={"success": True, "result_url": address})

    def _log_file(self, instance_id: str) -> Reply:
        """Answer not there yet once, as storage does that is written meanwhile."""
        if not self._logs.get(instance_id):
            self._logs[instance_id] = f"container {instance_id} started\nsshd started\n"
            return Reply(status=404, body="<Error>NoSuchKey</Error>", content_type="text/xml")
        return Reply(body=self._logs[instance_id], content_type="text/plain")

    def _user(self, request: Request) -> Reply:
        user = {"id": 1, "email": "user@example.com", "credit": self.balance_usd, "balance": 0.0}
        return Reply(body=user)

    def _charges(self, request: Request) -> Reply:
        filters = json.loads(request.query.get("select_filters") or "{}")
        if not {"gte", "lte"} <= set(filters.get("day") or {}):
            return _refuse(400, "invalid_request", "day needs gte and lte")
        now_s = self.now_s()
        results = [
            {
                "start": rental.created_at,
                "end": rental.ended_at or now_s,
                "type": "instance",
                "source": f"instance-{rental.instance_id}",
                "amount": rental.dph * ((rental.ended_at or now_s) - rental.created_at) / 3600,
                "metadata": {"label": rental.label},
                "items": [],
            }
            for rental in self.rentals.values()
        ]
        return Reply(body={"results": results, "next_token": None})

    def _alive(self, instance_id: str) -> Rental | None:
        rental = self.rentals.get(instance_id)
        return rental if rental is not None and rental.ended_at is None else None

    def _document(self, rental: Rental) -> dict[str, object]:
        row = rental.facts["row"]
        if self.faults.strikes("outbid"):
            self.halt(rental)
        word = "stopped" if rental.is_stopped else "running"
        actual, message = self._progress(rental)
        document: dict[str, object] = {
            **(row if isinstance(row, dict) else {}),
            "id": int(rental.instance_id),
            "label": rental.label,
            "actual_status": actual,
            "cur_state": word,
            "next_state": word,
            "intended_status": word,
            "status_msg": message,
            "image_uuid": rental.facts["image"],
            "image_runtype": rental.facts["runtype"],
            "dph_total": rental.dph,
            "is_bid": rental.facts["is_bid"],
            "start_date": rental.created_at,
            "end_date": rental.facts["end_date"],
            "ssh_host": "ssh5.vast.ai",
            "ssh_port": 19_000,
            "public_ipaddr": None,
            "ports": None,
            "extra_env": [],
            "local_ipaddrs": "172.17.0.2 \n",
        }
        if actual == "running":
            host, port = self.address_of(rental)
            document["public_ipaddr"] = f"{host} "
            found = {22: port} | {one: self.published(rental, one)[1] for one in _ports_of(rental)}
            document["ports"] = {
                f"{inside}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(outside)}]  # noqa: S104
                for inside, outside in found.items()
            }
        return document

    def _progress(self, rental: Rental) -> tuple[str | None, str]:
        """Return actual_status and status_msg by how long it has been starting."""
        if rental.is_stopped:
            return "exited", ""
        if rental.boot_failure is not None:
            return "loading", rental.boot_failure
        if self.is_up(rental):
            is_off = self.faults.strikes("offline")
            return ("offline" if is_off else "running"), "success, running image/ssh"
        share = self.age_s(rental) / self.boot_s if self.boot_s else 1.0
        if share < 0.2:
            return None, ""
        if share < 0.7 or not rental.boots:
            return "loading", "3f1c: Downloading [==>   ]  1.1GB/5.2GB"
        return "created", ""


def _lane(request: Request) -> str:
    path, method = request.path, request.method
    lanes = (
        (path.startswith("/api/v0/asks/"), "create"),
        (path == "/api/v0/bundles/", "search"),
        (path == "/api/v1/instances/", "list"),
        (path.endswith("/ssh/"), "keys"),
        (path.startswith("/api/v0/charges"), "charges"),
        (path.startswith("/api/v0/instances/") and method == "GET", "get"),
        (path.startswith("/api/v0/instances/") and method == "DELETE", "destroy"),
        (path.startswith("/api/v0/instances/"), "change"),
    )
    return next((lane for is_it, lane in lanes if is_it), "")


def _fits(row: Mapping[str, object], name: str, ops: Mapping[str, object]) -> bool:
    """Return whether a row passes one filter; a row without the field does not."""
    value = row.get(name)
    return all(
        (value is not None or op in ("eq", "neq")) and _OPERATORS[op](value, _like(value, wanted))
        for op, wanted in ops.items()
    )


def _like(value: object, wanted: object) -> object:
    """Return ``wanted`` as a number where it is compared with one: the vendor's CLI sends text."""
    is_text = isinstance(wanted, str) and isinstance(value, int | float)
    return float(str(wanted)) if is_text else wanted


def _published_in(env: object) -> list[int]:
    """Return which ports a create call asks for, in the way of docker's options."""
    names = [str(name) for name in env] if isinstance(env, Mapping) else []
    found = [re.fullmatch(r"-p (\d+):(\d+)", name) for name in names]
    return [int(match.group(2)) for match in found if match]


def _ports_of(rental: Rental) -> list[int]:
    ports = rental.facts.get("ports")
    return list(ports) if isinstance(ports, list) else []


def _keys_in(script: str) -> list[str]:
    return re.findall(r"(?:ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", script)


def _refuse(status: int, code: str, text: str) -> Reply:
    return Reply(status=status, body={"success": False, "error": code, "msg": text})
