"""Lambda Cloud on loopback: fixed types, capacity that comes and goes, ends that take a while."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from paceline.testing.fakes.cloud import COMMON_FAULTS, FakeCloud, Rental, Reply, Request

_LINGERS_S = 60.0
"""For so long a row of a terminated machine stays in the list."""
_UNTERMINABLE_S = 3.0
# name, gpu description, cents an hour, GPUs, vCPUs, memory GiB, storage GiB
_TYPES = (
    ("gpu_1x_a10", "A10 (24 GB PCIe)", 129, 1, 30, 200, 1400),
    ("gpu_1x_a100", "A100 (40 GB PCIe)", 199, 1, 30, 200, 512),
    ("gpu_1x_a100_sxm4", "A100 (40 GB SXM4)", 199, 1, 30, 200, 512),
    ("gpu_1x_a6000", "A6000 (48 GB)", 109, 1, 14, 100, 200),
    ("gpu_1x_b200_sxm6", "B200 (180 GB SXM6)", 699, 1, 26, 360, 2816),
    ("gpu_1x_gh200", "GH200 (96 GB)", 229, 1, 64, 432, 4096),
    ("gpu_1x_h100_pcie", "H100 (80 GB PCIe)", 329, 1, 26, 200, 1024),
    ("gpu_1x_h100_sxm5", "H100 (80 GB SXM5)", 429, 1, 26, 225, 2816),
    ("gpu_1x_rtx6000", "RTX 6000 (24 GB)", 69, 1, 14, 46, 512),
    ("gpu_2x_a100", "A100 (40 GB PCIe)", 398, 2, 60, 400, 1024),
    ("gpu_2x_a6000", "A6000 (48 GB)", 218, 2, 28, 200, 1024),
    ("gpu_2x_b200_sxm6", "B200 (180 GB SXM6)", 1378, 2, 52, 720, 5632),
    ("gpu_2x_h100_sxm5", "H100 (80 GB SXM5)", 838, 2, 52, 450, 5632),
    ("gpu_4x_a100", "A100 (40 GB PCIe)", 796, 4, 120, 800, 1024),
    ("gpu_4x_a6000", "A6000 (48 GB)", 436, 4, 56, 400, 1024),
    ("gpu_4x_h100_sxm5", "H100 (80 GB SXM5)", 1636, 4, 104, 900, 11264),
    ("gpu_8x_a100", "A100 (40 GB SXM4)", 1592, 8, 124, 1800, 6144),
    ("gpu_8x_a100_80gb_sxm4", "A100 (80 GB SXM4)", 2232, 8, 240, 1800, 20480),
    ("gpu_8x_b200_sxm6", "B200 (180 GB SXM6)", 5352, 8, 208, 2900, 22528),
    ("gpu_8x_h100_sxm5", "H100 (80 GB SXM5)", 3192, 8, 208, 1800, 22528),
    ("gpu_8x_v100", "Tesla V100 (16 GB)", 632, 8, 92, 448, 6041),
)
_REGIONS = ("us-west-1", "us-east-1", "europe-central-1")
_FAULTS = {
    "no-regions": "a type is listed without a region that has some",
    "terminate-lacks-id": "a terminate is answered without the id, and not done",
    "key-race": "somebody registers the same key name just before",
    "old-error": "refusals come in the envelope of older versions",
}


class FakeLambda(FakeCloud):
    """The parts of Lambda's API that renting needs, below ``/api/v1``."""

    name: ClassVar[str] = "lambda"
    end_s_default: ClassVar[float] = 20.0
    faults_known: ClassVar[Mapping[str, str]] = {**COMMON_FAULTS, **_FAULTS}

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # the options of FakeCloud
        self.ssh_keys: list[dict[str, str]] = []
        self._num_launched = 0
        self._num_limited = 0

    def plant(self, *, label: str) -> str:
        """Have a machine that somebody launched in the console."""
        return self._launch({"name": label}, _TYPES[0]).instance_id

    def is_create(self, request: Request) -> bool:
        """Return whether a machine is being launched."""
        return request.path.endswith("/instance-operations/launch")

    def pace_of(self, request: Request) -> tuple[str, float] | None:
        """Return a launch in 12 seconds, any other call in one."""
        return ("launch", 12.0) if self.is_create(request) else ("all", 1.0)

    def too_many(self, request: Request) -> Reply:
        """Answer as the network in front does: no envelope, now text, now a page."""
        self._num_limited += 1
        if self._num_limited % 2:
            return Reply(status=429, body="error code: 1015", content_type="text/plain")
        page = "<html><body><h1>Error 1015</h1>You are being rate limited</body></html>"
        return Reply(status=429, body=page, content_type="text/html")

    def broken(self) -> Reply:
        """Answer 500 in the envelope."""
        return self._refuse(500, "global/internal-error", "An internal error occurred.")

    def advance(self) -> None:
        """Let machines that were told to go be gone after a while."""
        for rental in self.rentals.values():
            told_s = rental.facts.get("told_s")
            is_due = isinstance(told_s, float) and self.now_s() >= told_s + self.end_s
            if is_due and rental.ended_at is None:
                self.close_rental(rental)

    def route(self, request: Request) -> Reply:
        """Find who answers a path."""
        if request.bearer != self.key:
            text = "API key was invalid, expired, or deleted."
            return self._refuse(401, "global/invalid-api-key", text)
        path = request.path.removeprefix("/api/v1")
        one = r"/instances/([^/]+)"
        handlers: Sequence[tuple[str, str, Callable[..., Reply]]] = (
            ("GET", r"/instance-types", self._types),
            ("POST", r"/instance-operations/launch", self._create),
            ("POST", r"/instance-operations/terminate", self._terminate),
            ("GET", r"/instances", self._list),
            ("GET", one, self._get),
            ("POST", one, self._rename),
            ("GET", r"/ssh-keys", self._list_keys),
            ("POST", r"/ssh-keys", self._add_key),
        )
        for method, pattern, handler in handlers:
            found = re.fullmatch(pattern, path)
            if found and request.method == method:
                return handler(request, *found.groups())
        return self._refuse(404, "global/object-does-not-exist", "No such path.")

    def _types(self, request: Request) -> Reply:
        is_bare = self.faults.strikes("no-regions")
        data = {}
        for row in _TYPES:
            regions = [] if is_bare else [{"name": name, "description": name} for name in _REGIONS]
            data[row[0]] = {
                "instance_type": _type_document(row),
                "regions_with_capacity_available": regions,
            }
        return Reply(body={"data": data})

    def _create(self, request: Request) -> Reply:
        body = request.document
        row = next((row for row in _TYPES if row[0] == body.get("instance_type_name")), None)
        refusal = self._refused_launch(body)
        if row is None or refusal is not None:
            return refusal or self._refuse(400, "global/object-does-not-exist", "No such type.")
        rental = self._launch(body, row)
        keys = body.get("ssh_key_names")
        name = keys[0] if isinstance(keys, list) else ""
        rental.public_keys = [key["public_key"] for key in self.ssh_keys if key["name"] == name]
        return Reply(body={"data": {"instance_ids": [rental.instance_id]}})

    def _refused_launch(self, body: Mapping[str, object]) -> Reply | None:
        keys = body.get("ssh_key_names")
        is_one_key = isinstance(keys, list) and len(keys) == 1
        known = [[key["name"]] for key in self.ssh_keys]
        capacity = "instance-operations/launch/insufficient-capacity"
        checks = (
            (body.get("region_name") in _REGIONS, "global/object-does-not-exist", "No such region"),
            (is_one_key, "global/invalid-parameters", "Exactly one ssh key is needed"),
            ("quantity" not in body, "global/invalid-parameters", "Requested too many instances"),
            (keys in known, "global/object-does-not-exist", "No such ssh key"),
            (len(str(body.get("name") or "")) <= 64, "global/invalid-parameters", "Name too long"),
            (self.balance_usd > 0, "global/quota-exceeded", "Your quota does not allow this"),
            (not self.faults.strikes("no-balance"), "global/quota-exceeded", "Quota exceeded"),
            (not self.faults.strikes("no-capacity"), capacity, "Not enough capacity"),
        )
        for is_fine, code, text in checks:
            if not is_fine:
                return self._refuse(400, code, text)
        return None

    def _launch(self, body: Mapping[str, object], row: tuple[object, ...]) -> Rental:
        self._num_launched += 1
        rental = self.open_rental(
            f"{self.rng.randrange(16**24):024x}{self._num_launched:08x}",
            label=str(body.get("name") or ""),
            dph=float(str(row[2])) / 100,
        )
        memory = re.search(r"([0-9]+) GB", str(row[1]))
        memory_mb = 1024 * float(memory.group(1)) if memory else 0.0
        self.put_gpus(rental, str(row[1]), count=int(str(row[3])), memory_mb=memory_mb)
        rental.facts = {"row": row, "region": body.get("region_name") or _REGIONS[0]}
        rental.facts["tags"] = body.get("tags") or []
        tags = body.get("tags")
        for tag in tags if isinstance(tags, list) else []:
            if tag.get("key") == "paceline-label":
                rental.label = str(tag.get("value"))
        rental.facts["name"] = str(body.get("name") or "")
        if self.faults.strikes("boot-fails"):
            rental.boot_failure = "unhealthy"
        return rental

    def _terminate(self, request: Request) -> Reply:
        ids = request.document.get("instance_ids")
        gone = []
        for instance_id in ids if isinstance(ids, list) else []:
            rental = self._visible(str(instance_id))
            if rental is None:
                return self._refuse(404, "global/object-does-not-exist", "No such instance.")
            word = self._word(rental)
            if word == "terminating":
                return self._refuse(500, "global/unknown", "An unknown error occurred.")
            if word == "terminated" or self.faults.strikes("terminate-lacks-id"):
                continue
            if not self.faults.strikes("ignored-destroy"):
                rental.facts["told_s"] = self.now_s()
            gone.append(self._document(rental))
        return Reply(body={"data": {"terminated_instances": gone}})

    def _list(self, request: Request) -> Reply:
        rows = [
            self._document(rental)
            for rental in self.rentals.values()
            if self._visible(rental.instance_id) and rental.listed_from_s <= self.now_s()
        ]
        return Reply(body={"data": rows})

    def _get(self, request: Request, instance_id: str) -> Reply:
        rental = self._visible(instance_id)
        if rental is None:
            return self._refuse(404, "global/object-does-not-exist", "No such instance.")
        return Reply(body={"data": self._document(rental)})

    def _rename(self, request: Request, instance_id: str) -> Reply:
        rental = self._visible(instance_id)
        if rental is None:
            return self._refuse(404, "global/object-does-not-exist", "No such instance.")
        name = str(request.document.get("name") or "")
        if len(name) > 64:
            return self._refuse(400, "global/invalid-parameters", "The name is too long.")
        rental.facts["name"] = rental.label = name
        return Reply(body={"data": self._document(rental)})

    def _list_keys(self, request: Request) -> Reply:
        return Reply(body={"data": self.ssh_keys})

    def _add_key(self, request: Request) -> Reply:
        body = request.document
        key = {
            "id": f"{len(self.ssh_keys):032x}",
            "name": str(body.get("name")),
            "public_key": str(body.get("public_key")),
        }
        if self.faults.strikes("key-race"):
            self.ssh_keys.append(dict(key))
        if any(known["name"] == key["name"] for known in self.ssh_keys):
            return self._refuse(400, "global/duplicate", "Key name must be unique")
        self.ssh_keys.append(key)
        return Reply(body={"data": key})

    def _visible(self, instance_id: str) -> Rental | None:
        """Return a machine that the API still knows, also some that are gone."""
        rental = self.rentals.get(instance_id)
        if rental is None:
            return None
        is_over = rental.ended_at is not None and self.now_s() > rental.ended_at + _LINGERS_S
        return None if is_over else rental

    def _word(self, rental: Rental) -> str:
        if rental.ended_at is not None:
            return "terminated"
        if "told_s" in rental.facts:
            return "terminating"
        if rental.boot_failure is not None:
            return "unhealthy"
        return "active" if self.is_up(rental) else "booting"

    def _document(self, rental: Rental) -> dict[str, object]:
        row = rental.facts["row"]
        word = self._word(rental)
        has_address = self.age_s(rental) >= self.boot_s / 3
        address = self.address_of(rental)[0] if word == "active" else "192.0.2.44"
        is_new = self.now_s() - rental.created_at < _UNTERMINABLE_S
        return {
            "id": rental.instance_id,
            "name": rental.facts["name"],
            "ip": address if has_address else None,
            "private_ip": "10.19.1.4",
            "status": word,
            "ssh_key_names": [],
            "file_system_names": [],
            "region": {"name": rental.facts["region"], "description": "somewhere"},
            "instance_type": _type_document(row if isinstance(row, tuple) else ()),
            "hostname": "host",
            "actions": {
                "terminate": {"available": not is_new, "reason_code": "vm-has-not-launched"}
            },
            "tags": rental.facts["tags"],
            "firewall_rulesets": [],
        }

    def _refuse(self, status: int, code: str, text: str) -> Reply:
        error: dict[str, object] = {"code": code, "message": text, "suggestion": "Try again."}
        body: dict[str, object] = {"error": error}
        if self.faults.strikes("old-error"):
            body["field_errors"] = {}
        return Reply(status=status, body=json.dumps(body))


def _type_document(row: tuple[object, ...]) -> dict[str, object]:
    name, description, cents, gpus, vcpus, memory_gib, storage_gib = row
    return {
        "name": name,
        "description": f"{gpus}x {description}",
        "gpu_description": description,
        "price_cents_per_hour": cents,
        "specs": {
            "vcpus": vcpus,
            "memory_gib": memory_gib,
            "storage_gib": storage_gib,
            "gpus": gpus,
        },
    }
