"""Nebius on loopback: a gRPC server of the official SDK's own messages, without protoc."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

import grpc
from nebius.api.google.rpc import Status
from nebius.api.nebius.billing import v1alpha1 as billing
from nebius.api.nebius.capacity import v1 as capacity
from nebius.api.nebius.common import v1 as common
from nebius.api.nebius.compute import v1 as compute
from nebius.api.nebius.iam import v1 as iam
from nebius.api.nebius.vpc import v1 as vpc

from paceline.rental.rpc import RpcCall, RpcFailedError
from paceline.testing.fakes.cloud import COMMON_FAULTS, FakeCloud, Rental, Reply, Request

TENANT_ID = "tenant-e00fake"
PROJECT_ID = "project-e00fake"
_REGION = "eu-north1"
_DRIP_S = 3600.0
_USD_PER_GIB = 0.071 / 720
# platform, GB per GPU, $/h of one GPU, presets
_PLATFORMS = (
    ("gpu-h100-sxm", 80, 2.95, ("1gpu-16vcpu-200gb", "8gpu-128vcpu-1600gb")),
    ("gpu-h200-sxm", 141, 3.5, ("1gpu-16vcpu-200gb", "8gpu-128vcpu-1600gb")),
    ("gpu-b200-sxm", 180, 5.5, ("1gpu-20vcpu-224gb", "8gpu-160vcpu-1792gb")),
    ("gpu-l40s-a", 48, 1.55, ("1gpu-8vcpu-32gb", "2gpu-16vcpu-64gb")),
    ("gpu-rtx6000", 96, 1.8, ("1gpu-16vcpu-96gb",)),
    ("cpu-d3", 0, 0.1, ("4vcpu-16gb",)),
)
_INVALID, _NOT_FOUND, _EXISTS, _EXHAUSTED, _PRECONDITION = 3, 5, 6, 8, 9
_INTERNAL, _UNAUTHENTICATED, _UNIMPLEMENTED = 13, 16, 12
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}

_FAULTS = {
    "delete-refused": "a delete is refused while something else goes on",
    "preempt": "a preemptible machine is stopped",
    "disk-stays": "a disk outlives its machine, and bills on",
    "limit-reached": "the advice says that a platform has nothing left",
}


class FakeNebius(FakeCloud):
    """The parts of Nebius's API that renting needs."""

    name: ClassVar[str] = "nebius"
    end_s_default: ClassVar[float] = 8.0
    faults_known: ClassVar[Mapping[str, str]] = {**COMMON_FAULTS, **_FAULTS}

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # the options of FakeCloud
        self.disks: dict[str, str] = {}
        """Boot disk -> machine; one whose machine is gone is a leak."""
        self.disk_names: dict[str, str] = {}
        self._num_made = 0
        self._operations: dict[str, Any] = {}
        self._by_idempotency_key: dict[str, Any] = {}

    def plant(self, *, label: str) -> str:
        """Have a machine that somebody made in the console."""
        request = compute.CreateInstanceRequest(
            metadata=common.ResourceMetadata(parent_id=PROJECT_ID, name=label),
            spec=compute.InstanceSpec(
                resources=compute.ResourcesSpec(platform="gpu-l40s-a", preset=_PLATFORMS[3][3][0])
            ),
        )
        return self._make(request).instance_id

    def is_create(self, request: Request) -> bool:
        """Return whether a machine is being made."""
        return request.path == "/nebius.compute.v1.InstanceService/Create"

    def too_many(self, request: Request) -> Reply:
        """Refuse with the detail that says why."""
        return _refuse(_EXHAUSTED, "too many requests", "too_many_requests")

    def broken(self) -> Reply:
        """Fail on our own side."""
        return _refuse(_INTERNAL, "internal error", "internal_error")

    def advance(self) -> None:
        """Let machines that are being deleted be gone after a while, with their disks."""
        for rental in self.rentals.values():
            told_s = rental.facts.get("told_s")
            is_due = isinstance(told_s, float) and self.now_s() >= told_s + self.end_s
            if is_due and rental.ended_at is None:
                self.close_rental(rental)
                if self.faults.strikes("disk-stays"):
                    continue
                self.disks = {
                    disk: owner for disk, owner in self.disks.items() if owner != rental.instance_id
                }

    def route(self, request: Request) -> Reply:
        """Find who answers a method."""
        if request.bearer != self.key:
            return _refuse(_UNAUTHENTICATED, "token is invalid or expired", "permission_denied")
        handlers: Mapping[str, tuple[Any, Callable[[Request, Any], Reply]]] = {
            "compute.v1.InstanceService/Create": (compute.CreateInstanceRequest, self._create),
            "compute.v1.InstanceService/Get": (compute.GetInstanceRequest, self._get),
            "compute.v1.InstanceService/GetByName": (common.GetByNameRequest, self._get_by_name),
            "compute.v1.InstanceService/List": (compute.ListInstancesRequest, self._list),
            "compute.v1.InstanceService/Delete": (compute.DeleteInstanceRequest, self._delete),
            "compute.v1.InstanceService/Stop": (compute.StopInstanceRequest, self._stop),
            "compute.v1.InstanceService/Start": (compute.StartInstanceRequest, self._start),
            "compute.v1.DiskService/List": (compute.ListDisksRequest, self._list_disks),
            "compute.v1.PlatformService/List": (compute.ListPlatformsRequest, self._platforms),
            "vpc.v1.SubnetService/List": (vpc.ListSubnetsRequest, self._subnets),
            "iam.v1.TenantService/List": (iam.ListTenantsRequest, self._tenants),
            "iam.v1.ProjectService/List": (iam.ListProjectsRequest, self._projects),
            "capacity.v1.ResourceAdviceService/List": (
                capacity.ListResourceAdviceRequest,
                self._advice,
            ),
            "billing.v1alpha1.CalculatorService/Estimate": (
                billing.EstimateRequest,
                self._estimate,
            ),
            "common.v1.OperationService/Get": (common.GetOperationRequest, self._get_operation),
            "compute.v1.OperationService/Get": (common.GetOperationRequest, self._get_operation),
        }
        entry = handlers.get(request.path.removeprefix("/nebius."))
        if entry is None:
            return _refuse(_UNIMPLEMENTED, f"unknown method {request.path}", "bad_request")
        message, handler = entry
        return handler(request, message.FromString(request.body))

    def _create(self, request: Request, asked: Any) -> Reply:
        key = request.headers.get("x-idempotency-key", "")
        if key and key in self._by_idempotency_key:
            return _answer(self._by_idempotency_key[key])
        refusal = self._refused_create(asked)
        if refusal is not None:
            return refusal
        rental = self._make(asked)
        if self.faults.strikes("boot-fails"):
            rental.boot_failure = "NotEnoughResources"
        operation = self._operation(rental, "create")
        if key:
            self._by_idempotency_key[key] = operation
        return _answer(operation)

    def _refused_create(self, asked: Any) -> Reply | None:
        spec, metadata = asked.spec, asked.metadata
        names = {
            rental.facts["name"] for rental in self.rentals.values() if rental.ended_at is None
        }
        interfaces = list(spec.network_interfaces)
        disk = spec.boot_disk.managed_disk
        size_gib = disk.spec.size_gibibytes if disk is not None else 0
        wrong = (
            (metadata.parent_id != PROJECT_ID, "no such project"),
            (_price(spec) is None, "no such platform or preset"),
            (len(interfaces) != 1 or not interfaces[0].subnet_id, "network_interfaces"),
            (int(size_gib or 0) < 40, "the image needs a boot disk of 40 GB"),
            (len(spec.cloud_init_user_data) > 32_768, "cloud_init_user_data is too long"),
        )
        for is_wrong, text in wrong:
            if is_wrong:
                return _refuse(_INVALID, text, "bad_request")
        if metadata.name in names:
            return _refuse(_EXISTS, f"{metadata.name} exists", "resource_already_exists")
        if self.balance_usd <= 0 or self.faults.strikes("no-balance"):
            return _refuse(_EXHAUSTED, "quota exceeded", "quota_failure")
        if self.faults.strikes("no-capacity"):
            return _refuse(_EXHAUSTED, "not enough resources", "not_enough_resources")
        return None

    def _make(self, asked: Any) -> Rental:
        self._num_made += 1
        label = dict(asked.metadata.labels).get("paceline-label") or asked.metadata.name
        disk = asked.spec.boot_disk.managed_disk if asked.spec.HasField("boot_disk") else None
        size_gib = int(disk.spec.size_gibibytes or 0) if disk is not None else 50
        rental = self.open_rental(
            f"computeinstance-e00{self._num_made:06d}",
            label=label,
            dph=(_price(asked.spec) or 0.0) + size_gib * _USD_PER_GIB,
        )
        rental.facts = {
            "name": asked.metadata.name,
            "labels": dict(asked.metadata.labels),
            "spec": asked.spec,
        }
        platform, preset = asked.spec.resources.platform, asked.spec.resources.preset
        memory_gb = next((row[1] for row in _PLATFORMS if row[0] == platform), 0)
        width = re.match(r"([0-9]+)gpu-", preset)
        if width is not None:
            count = int(width.group(1))
            self.put_gpus(rental, platform, count=count, memory_mb=memory_gb * 1024)
        script = asked.spec.cloud_init_user_data
        rental.public_keys = re.findall(r"(?:ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", script)
        disk_id = f"computedisk-e00{self._num_made:06d}"
        self.disks[disk_id] = rental.instance_id
        self.disk_names[disk_id] = disk.name if disk is not None else ""
        return rental

    def _get(self, request: Request, asked: Any) -> Reply:
        rental = self._alive(asked.id)
        return _absent(asked.id) if rental is None else _answer(self._message(rental))

    def _get_by_name(self, request: Request, asked: Any) -> Reply:
        for rental in self.rentals.values():
            if rental.ended_at is None and rental.facts["name"] == asked.name:
                return _answer(self._message(rental))
        return _absent(asked.name)

    def _list(self, request: Request, asked: Any) -> Reply:
        rows = [
            rental
            for rental in self.rentals.values()
            if rental.ended_at is None and rental.listed_from_s <= self.now_s()
        ]
        first = int(asked.page_token or 0)
        last = first + (int(asked.page_size) or 10)
        return _answer(
            compute.ListInstancesResponse(
                items=[self._message(rental) for rental in rows[first:last]],
                next_page_token=str(last) if last < len(rows) else "",
            )
        )

    def _list_disks(self, request: Request, asked: Any) -> Reply:
        items = [
            compute.Disk(
                metadata=common.ResourceMetadata(id=disk_id, name=self.disk_names[disk_id])
            )
            for disk_id in self.disks
        ]
        return _answer(compute.ListDisksResponse(items=items))

    def _delete(self, request: Request, asked: Any) -> Reply:
        rental = self._alive(asked.id)
        if rental is None:
            return _absent(asked.id)
        if self.faults.strikes("delete-refused") or "told_s" in rental.facts:
            return _refuse(_PRECONDITION, "another operation is running", "operation_conflict")
        if not self.faults.strikes("ignored-destroy"):
            rental.facts["told_s"] = self.now_s()
        return _answer(self._operation(rental, "delete"))

    def _stop(self, request: Request, asked: Any) -> Reply:
        rental = self._alive(asked.id)
        if rental is None:
            return _absent(asked.id)
        if rental.is_stopped:
            return _refuse(_PRECONDITION, "instance is stopped", "bad_resource_state")
        self.halt(rental)
        return _answer(self._operation(rental, "stop"))

    def _start(self, request: Request, asked: Any) -> Reply:
        rental = self._alive(asked.id)
        if rental is None:
            return _absent(asked.id)
        if not rental.is_stopped:
            return _refuse(_PRECONDITION, "instance is running", "bad_resource_state")
        self.resume(rental)
        return _answer(self._operation(rental, "start"))

    def _platforms(self, request: Request, asked: Any) -> Reply:
        items = [
            compute.Platform(
                metadata=common.ResourceMetadata(id=f"platform-{name}", name=name),
                spec=compute.PlatformSpec(
                    presets=[_preset(preset) for preset in presets],
                    gpu_memory_gigabytes=memory_gb,
                ),
                status=compute.PlatformStatus(allowed_for_preemptibles=memory_gb > 0),
            )
            for name, memory_gb, _, presets in _PLATFORMS
        ]
        first = int(asked.page_token or 0)
        last = first + (int(asked.page_size) or 10)
        token = str(last) if last < len(items) else ""
        return _answer(
            compute.ListPlatformsResponse(items=items[first:last], next_page_token=token)
        )

    def _subnets(self, request: Request, asked: Any) -> Reply:
        metadata = common.ResourceMetadata(id="vpcsubnet-e00fake", name="default-subnet-1")
        return _answer(vpc.ListSubnetsResponse(items=[vpc.Subnet(metadata=metadata)]))

    def _tenants(self, request: Request, asked: Any) -> Reply:
        metadata = common.ResourceMetadata(id=TENANT_ID, name="tenant")
        return _answer(iam.ListTenantsResponse(items=[iam.Container(metadata=metadata)]))

    def _projects(self, request: Request, asked: Any) -> Reply:
        project = iam.Container(
            metadata=common.ResourceMetadata(id=PROJECT_ID, name="project"),
            status=iam.ContainerStatus(region=_REGION),
        )
        return _answer(iam.ListProjectsResponse(items=[project]))

    def _advice(self, request: Request, asked: Any) -> Reply:
        kind = capacity.ResourceAdviceStatus__Availability
        level = "LIMIT_REACHED" if self.faults.strikes("limit-reached") else "HIGH"
        said = kind.from_json(
            f'{{"data_state": "DATA_STATE_FRESH", "availability_level": '
            f'"AVAILABILITY_LEVEL_{level}"}}'
        )
        items = []
        for name, _, _, presets in _PLATFORMS:
            for preset in presets:
                spec = capacity.ResourceAdviceSpec.from_json(
                    f'{{"region": "{_REGION}", "compute_instance": '
                    f'{{"platform": "{name}", "preset": {{"name": "{preset}"}}}}}}'
                )
                status = capacity.ResourceAdviceStatus(on_demand=said, preemptible=said)
                items.append(capacity.ResourceAdvice(spec=spec, status=status))
        return _answer(capacity.ListResourceAdviceResponse(items=items))

    def _estimate(self, request: Request, asked: Any) -> Reply:
        machine, disk = asked.resource_spec.compute_instance_spec, None
        if machine is None:
            disk = asked.resource_spec.compute_disk_spec
        price = (
            int(disk.spec.size_gibibytes) * _USD_PER_GIB
            if disk is not None
            else _price(machine.spec)
        )
        if price is None:
            return _refuse(_INVALID, "no such platform or preset", "bad_request")
        total = billing.CostBreakdown(cost=f"{price:.8f}", cost_rounded=f"{price:.2f}")
        cost = billing.ResourceGroupCost(general=billing.GeneralTotalCost(total=total))
        return _answer(billing.EstimateResponse(hourly_cost=cost))

    def _operation(self, rental: Rental, what: str) -> Any:
        operation = common.Operation(
            id=f"computeoperation-e00{len(self._operations):06d}",
            description=what,
            resource_id=rental.instance_id,
            created_at=_moment(self.now_s()),
        )
        self._operations[operation.id] = (operation, what, rental)
        return operation

    def _get_operation(self, request: Request, asked: Any) -> Reply:
        found = self._operations.get(asked.id)
        if found is None:
            return _absent(asked.id)
        operation, what, rental = found
        if rental.boot_failure is not None and what == "create":
            status = _status(_EXHAUSTED, "not enough resources", "not_enough_resources")
        elif what != "create" or self.is_up(rental):
            status = Status(code=0)
        else:
            return _answer(operation)
        finished = common.Operation(
            id=operation.id,
            description=what,
            resource_id=rental.instance_id,
            created_at=operation.created_at,
            finished_at=_moment(self.now_s()),
        )
        finished.status = status
        return _answer(finished)

    def _alive(self, instance_id: str) -> Rental | None:
        rental = self.rentals.get(instance_id)
        return rental if rental is not None and rental.ended_at is None else None

    def _state(self, rental: Rental) -> tuple[str, bool]:
        """Return the state and whether it is being worked on."""
        if "told_s" in rental.facts:
            return "DELETING", True
        if self.faults.strikes("preempt") and self.is_up(rental):
            self.halt(rental)
        if rental.is_stopped:
            return "STOPPED", False
        share = self.age_s(rental) / self.boot_s if self.boot_s else 1.0
        if share < 0.2:
            return "STOPPED", True
        if rental.boot_failure is not None and share > 0.5:
            return "STOPPED", False
        return ("RUNNING", False) if self.is_up(rental) else ("STARTING", True)

    def _message(self, rental: Rental) -> Any:
        state, is_reconciling = self._state(rental)
        facts: dict[str, Any] = rental.facts
        interfaces = []
        if state == "RUNNING":
            address = compute.PublicIPAddressStatus(address=f"{self.address_of(rental)[0]}/32")
            interfaces = [compute.NetworkInterfaceStatus(name="eth0", public_ip_address=address)]
        return compute.Instance(
            metadata=common.ResourceMetadata(
                id=rental.instance_id,
                parent_id=PROJECT_ID,
                name=str(rental.facts["name"]),
                labels=facts["labels"],
                created_at=_moment(rental.created_at),
            ),
            spec=facts["spec"],
            status=compute.InstanceStatus(
                state=compute.InstanceStatus__InstanceState[state],
                reconciling=is_reconciling,
                network_interfaces=interfaces,
            ),
        )


class FakeWire:
    """Carries calls to a fake of the same process."""

    def __init__(self, fake: FakeCloud) -> None:
        self._fake = fake

    def __call__(self, call: RpcCall) -> bytes:
        """Answer, refuse, or break the connection."""
        reply = self._fake.answer(
            Request(
                method="RPC",
                path=f"/{call.service}/{call.method}",
                headers=dict(call.metadata),
                body=call.content,
            )
        )
        if reply.is_lost:
            raise RpcFailedError("UNAVAILABLE", "Socket closed")
        if reply.is_slow:
            self._fake.clock.sleep(call.timeout_s)
            raise RpcFailedError("DEADLINE_EXCEEDED", "Deadline Exceeded")
        if reply.status not in (0, 200):
            raise RpcFailedError(_NAMES[reply.status], str(reply.body), reply.trailer)
        return reply.content


@contextmanager
def serving_grpc(fake: FakeCloud, *, port: int = 0) -> Iterator[str]:
    """Serve over gRPC on loopback and yield ``host:port``."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((_Handler(fake),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            server.stop(grace=None).wait()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, fake: FakeCloud) -> None:
        self._fake = fake

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        headers = {
            name.lower(): str(value) for name, value in handler_call_details.invocation_metadata
        }

        def answer(body: bytes, context: Any) -> bytes:
            reply = self._fake.answer(Request(method="RPC", path=path, headers=headers, body=body))
            if reply.is_lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if reply.is_slow:
                self._fake.clock.sleep(_DRIP_S)
            if reply.status not in (0, 200):
                if reply.trailer is not None:
                    context.set_trailing_metadata((("grpc-status-details-bin", reply.trailer),))
                context.abort(grpc.StatusCode[_NAMES[reply.status]], str(reply.body))
            return reply.content

        return grpc.unary_unary_rpc_method_handler(answer)


def _price(spec: Any) -> float | None:
    """Return $/h of a machine without its disk, or None for what is not sold."""
    for name, _, gpu_dph, presets in _PLATFORMS:
        if name == spec.resources.platform and spec.resources.preset in presets:
            width = int(re.match(r"[0-9]*", spec.resources.preset)[0] or 1)  # type: ignore[index]
            return gpu_dph * width * (0.5 if spec.HasField("preemptible") else 1.0)
    return None


def _preset(name: str) -> Any:
    gpus = re.match(r"([0-9]+)gpu-", name)
    resources = compute.PresetResources(gpu_count=int(gpus.group(1)) if gpus else 0)
    return compute.Preset(name=name, resources=resources)


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def _answer(message: Any) -> Reply:
    content: bytes = message.SerializeToString()
    return Reply(body=content)


def _absent(what: str) -> Reply:
    return _refuse(_NOT_FOUND, f"{what} not found", "resource_not_found")


def _status(code: int, text: str, detail: str) -> Any:
    words: Sequence[str] = [word.capitalize() for word in detail.split("_")]
    return Status.from_json(
        f'{{"code": {code}, "message": "{text}", "details": [{{"@type": '
        f'"type.googleapis.com/nebius.common.v1.ServiceError", "service": "compute", '
        f'"code": "{"".join(words)}", "{detail}": {{}}}}]}}'
    )


def _refuse(code: int, text: str, detail: str) -> Reply:
    trailer: bytes = _status(code, text, detail).SerializeToString()
    return Reply(status=code, body=text, trailer=trailer)
