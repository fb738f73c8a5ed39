"""The calls of Nebius's gRPC API, by name; what they mean is in mapping.py.

Messages are those of the official SDK; the calls are plain gRPC. The SDK's own machinery is
asynchronous, repeats creates that ran out of resources at once, and waits without end for a token
that is refused; a blocking call with a deadline has none of that.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from nebius.api.google.rpc import Status
from nebius.api.nebius.billing import v1alpha1 as billing
from nebius.api.nebius.capacity import v1 as capacity
from nebius.api.nebius.common import v1 as common
from nebius.api.nebius.compute import v1 as compute
from nebius.api.nebius.iam import v1 as iam
from nebius.api.nebius.vpc import v1 as vpc
from nebius.base.service_account.credentials_file import ServiceAccountCredentials
from nebius.base.service_account.service_account import ServiceAccount

from paceline.core.retry import RetryPolicy
from paceline.rental.answers import Refusal, number_at, rows_at, text_at
from paceline.rental.backends.nebius import mapping
from paceline.rental.backends.nebius.config import NebiusConfig
from paceline.rental.credentials import Credential
from paceline.rental.errors import (
    AbsentError,
    AmbiguousError,
    ApiError,
    AuthError,
    GarbageError,
    MissingKeyError,
    NoAnswerError,
    RateLimitError,
)
from paceline.rental.httpapi import ALL_CALLS, Effect, HttpParts
from paceline.rental.rpc import RpcCall, RpcFailedError, Wire

_DOMAIN = "api.nebius.cloud:443"
_HOSTS = {
    "nebius.compute.v1": "compute",
    "nebius.iam.v1": "cpl.iam",
    "nebius.iam.v1.TokenExchangeService": "tokens.iam",
    "nebius.vpc.v1": "vpc",
    "nebius.billing.v1alpha1": "api.calculator.billing-data-plane",
    "nebius.capacity.v1": "capacity-advisor.billing-cpl",
}
_LOOPBACK = ("127.0.0.1:", "localhost:", "[::1]:")
_BYTES_MAX = 16 * 2**20
_PAGE_ROWS = 100
_NUM_PAGES_MAX = 100
_CALL_TIMEOUT_S = 30.0
_TIMEOUT_S = 120.0
_INTERVALS_S = {ALL_CALLS: 0.1}
_BURSTS = {ALL_CALLS: 10}
"""What one rental takes, at once; the provider tells no limit, so what follows keeps apart."""
_POLICY = RetryPolicy(attempts=4, first_delay_s=1.0, delay_s_max=20.0)
_TOKEN_MARGIN_S = 60.0


class GrpcWire:
    """Calls over the network; channels are opened when needed and kept."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._channels: dict[str, grpc.Channel] = {}

    def __call__(self, call: RpcCall) -> bytes:
        """Send once."""
        rpc: Any = self._channel(call.service).unary_unary(
            f"/{call.service}/{call.method}", request_serializer=None, response_deserializer=None
        )
        try:
            answer: bytes = rpc(call.content, metadata=call.metadata, timeout=call.timeout_s)
        except grpc.RpcError as exc:
            failure: Any = exc
            trailers = dict(failure.trailing_metadata() or ())
            raise RpcFailedError(
                failure.code().name,
                failure.details() or "",
                trailers.get("grpc-status-details-bin"),
            ) from exc
        return answer

    def _channel(self, service: str) -> grpc.Channel:
        package = service.rpartition(".")[0]
        host = f"{_HOSTS.get(service) or _HOSTS[package]}.{_DOMAIN}"
        address = self._endpoint or host
        if address not in self._channels:
            options = [("grpc.max_receive_message_length", _BYTES_MAX)]
            self._channels[address] = (
                grpc.insecure_channel(address, options=options)
                if address.startswith(_LOOPBACK)
                else grpc.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
            )
        return self._channels[address]


class NebiusClient:
    """One account on Nebius."""

    def __init__(
        self,
        config: NebiusConfig,
        *,
        credential: Callable[[], Credential | None],
        parts: HttpParts,
        wire: Wire | None = None,
    ) -> None:
        self._config = config
        self._credential = credential
        self._parts = parts
        self._wire = wire or GrpcWire(config.endpoint)
        self._pacer = parts.pacers.of(f"nebius {config.endpoint}")
        self._exchanged: tuple[str, str, float] | None = None
        """Credentials, the token made of them, until when it is used."""

    def projects(self) -> list[Mapping[str, object]]:
        """Return the projects to rent in: the one that is set, or all that we may see."""
        if self._config.project_id:
            return [{"metadata": {"id": self._config.project_id}}]
        service = "nebius.iam.v1.TenantService"
        tenants = self._pages(service, iam.ListTenantsRequest, iam.ListTenantsResponse, {})
        return [
            project
            for tenant in tenants
            for project in self._pages(
                "nebius.iam.v1.ProjectService",
                iam.ListProjectsRequest,
                iam.ListProjectsResponse,
                {"parent_id": text_at(tenant, "metadata", "id")},
            )
        ]

    def platforms(self, project_id: str) -> list[Mapping[str, object]]:
        """Return what a project's region has."""
        return self._pages(
            "nebius.compute.v1.PlatformService",
            compute.ListPlatformsRequest,
            compute.ListPlatformsResponse,
            {"parent_id": project_id},
        )

    def advice(self) -> list[Mapping[str, object]]:
        """Return what is said about capacity; nothing without a tenant."""
        if not self._config.tenant_id:
            return []
        return self._pages(
            "nebius.capacity.v1.ResourceAdviceService",
            capacity.ListResourceAdviceRequest,
            capacity.ListResourceAdviceResponse,
            {"parent_id": self._config.tenant_id},
        )

    def estimate(self, kind: str, document: Mapping[str, object]) -> Mapping[str, object]:
        """Return the price of a request of ``kind``, a field of the calculator's."""
        return self._call(
            "nebius.billing.v1alpha1.CalculatorService/Estimate",
            billing.EstimateRequest,
            billing.EstimateResponse,
            {"resource_spec": {kind: document}},
        )

    def subnets(self, project_id: str) -> list[Mapping[str, object]]:
        """Return a project's subnets."""
        return self._pages(
            "nebius.vpc.v1.SubnetService",
            vpc.ListSubnetsRequest,
            vpc.ListSubnetsResponse,
            {"parent_id": project_id},
        )

    def create(self, document: Mapping[str, object], *, idempotency_key: str) -> str:
        """Create a machine and return its id, which is known before it exists; made once."""
        operation = self._call(
            "nebius.compute.v1.InstanceService/Create",
            compute.CreateInstanceRequest,
            common.Operation,
            document,
            effect=Effect.ONCE,
            idempotency_key=idempotency_key,
        )
        refusal = mapping.operation_refusal(operation)
        if refusal is not None:
            raise _refused("Create", refusal)
        instance_id = text_at(operation, "resource_id")
        if not mapping.is_instance_id(instance_id):
            raise GarbageError("nebius: the create call was answered without an id")
        return instance_id

    def instance(self, instance_id: str) -> Mapping[str, object] | None:
        """Return one machine, or None where it does not exist."""
        try:
            return self._call(
                "nebius.compute.v1.InstanceService/Get",
                compute.GetInstanceRequest,
                compute.Instance,
                {"id": _checked(instance_id)},
            )
        except AbsentError:
            return None

    def instances(self, project_id: str) -> list[Mapping[str, object]]:
        """Return every machine of a project."""
        return self._pages(
            "nebius.compute.v1.InstanceService",
            compute.ListInstancesRequest,
            compute.ListInstancesResponse,
            {"parent_id": project_id},
        )

    def disks(self, project_id: str) -> list[Mapping[str, object]]:
        """Return every disk of a project."""
        return self._pages(
            "nebius.compute.v1.DiskService",
            compute.ListDisksRequest,
            compute.ListDisksResponse,
            {"parent_id": project_id},
        )

    def delete(self, instance_id: str) -> None:
        """Delete a machine. Raises AbsentError where it does not exist."""
        self._act("Delete", compute.DeleteInstanceRequest, instance_id)

    def stop(self, instance_id: str) -> None:
        """Stop a machine."""
        self._act("Stop", compute.StopInstanceRequest, instance_id)

    def start(self, instance_id: str) -> None:
        """Start a machine."""
        self._act("Start", compute.StartInstanceRequest, instance_id)

    def _act(self, method: str, request: Any, instance_id: str) -> None:
        operation = self._call(
            f"nebius.compute.v1.InstanceService/{method}",
            request,
            common.Operation,
            {"id": _checked(instance_id)},
            effect=Effect.REPEATABLE,
        )
        refusal = mapping.operation_refusal(operation)
        if refusal is not None:
            raise _refused(method, refusal)

    def _pages(
        self, service: str, request: Any, response: Any, document: Mapping[str, object]
    ) -> list[Mapping[str, object]]:
        rows: list[Mapping[str, object]] = []
        token = ""
        for _ in range(_NUM_PAGES_MAX):
            page = {**document, "page_size": str(_PAGE_ROWS), "page_token": token}
            answer = self._call(f"{service}/List", request, response, page)
            rows += rows_at(answer, "items")
            token = text_at(answer, "next_page_token")
            if not token:
                return rows
        raise GarbageError(f"nebius: {service} lists without end")

    def _call(
        self,
        path: str,
        request: Any,
        response: Any,
        document: Mapping[str, object],
        *,
        effect: Effect = Effect.READ,
        idempotency_key: str | None = None,
    ) -> Mapping[str, object]:
        """Return the answer as JSON has it; what may be repeated is."""
        clock = self._parts.clock
        deadline_s = clock.monotonic() + _TIMEOUT_S
        extra = [("x-idempotency-key", idempotency_key)] if idempotency_key else []
        content: bytes = request.from_json(json.dumps(document)).SerializeToString()
        tries = 0
        while True:
            tries += 1
            try:
                answer = self._once(path, content, [*self._authorization(), *extra])
                return _decode(path, response, answer)
            except (AmbiguousError, RateLimitError) as exc:
                delay_s = _POLICY.delay_s(tries, chance=self._parts.chance())
                is_over = delay_s is None or clock.monotonic() + delay_s > deadline_s
                if effect is Effect.ONCE or is_over or delay_s is None:
                    raise
                if isinstance(exc, RateLimitError):
                    delay_s = max(delay_s, 5.0)
                clock.sleep(delay_s)

    def _once(self, path: str, content: bytes, metadata: Sequence[tuple[str, str]]) -> bytes:
        service, _, method = path.partition("/")
        now_s = self._parts.clock.monotonic()
        wait_s = self._pacer.reserve(_INTERVALS_S, now_s=now_s, bursts=_BURSTS)
        self._parts.clock.sleep(wait_s)
        call = RpcCall(
            service=service,
            method=method,
            content=content,
            metadata=metadata,
            timeout_s=_CALL_TIMEOUT_S,
        )
        try:
            return self._wire(call)
        except RpcFailedError as exc:
            # not `from exc`: what the library says of a call may hold its metadata
            raise self._error(path, exc) from None

    def _error(self, path: str, failure: RpcFailedError) -> ApiError:
        text = self._clean(failure.text)
        if failure.code in ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"):
            return NoAnswerError(
                f"nebius: {path}: {failure.code} {text[:200]}; {NoAnswerError.advice}",
                was_sent="failed to connect" not in text.lower(),
                code=failure.code,
            )
        return _refused(path, mapping.judge(failure.code, text, _decode_status(failure.status)))

    def _authorization(self) -> list[tuple[str, str]]:
        credential = self._credential()
        if credential is None:
            raise MissingKeyError(f"nebius: there is no token; {MissingKeyError.advice}")
        token = credential.key
        if token.startswith("{"):
            token = self._exchange(credential.key)
        if not token.isascii() or not token.isprintable() or " " in token:
            raise AuthError(f"nebius: the token holds what no token has; {AuthError.advice}")
        return [("authorization", f"Bearer {token}")]

    def _exchange(self, text: str) -> str:
        """Return a token for a service account, made when the last one is about to end."""
        now_s = self._parts.clock.monotonic()
        if self._exchanged and self._exchanged[0] == text and now_s < self._exchanged[2]:
            return self._exchanged[1]
        try:
            found = ServiceAccountCredentials.from_json(json.loads(text)).subject_credentials
            account = ServiceAccount(found.parse_private_key(), found.kid, found.sub)
            content = account.get_exchange_token_request().SerializeToString()
        except (ValueError, KeyError, TypeError) as exc:
            raise AuthError(
                "nebius: the service account's credentials cannot be used: "
                f"{type(exc).__name__}; make new ones with `nebius iam auth-public-key generate`"
            ) from None
        path = "nebius.iam.v1.TokenExchangeService/Exchange"
        answer = _decode(path, iam.CreateTokenResponse, self._once(path, content, []))
        token = text_at(answer, "access_token")
        lasts_s = number_at(answer, "expires_in") or 0.0
        self._exchanged = (text, token, now_s + max(0.0, lasts_s - _TOKEN_MARGIN_S))
        return token

    def _clean(self, text: str) -> str:
        credential = self._credential()
        return text.replace(credential.key, "<token>") if credential else text


def _checked(instance_id: str) -> str:
    """Return it. Raises AbsentError for an id that no machine can have."""
    if not mapping.is_instance_id(instance_id):
        raise AbsentError(f"nebius has no machine {instance_id!r}")
    return instance_id


def _decode(path: str, message: Any, content: bytes) -> Mapping[str, object]:
    try:
        text = message.FromString(content).to_json(preserving_proto_field_name=True)
        found = json.loads(text)
    except Exception as exc:
        raise GarbageError(
            f"nebius: {path} was answered with {len(content)} bytes that are no such message "
            f"({type(exc).__name__}); {GarbageError.advice}"
        ) from exc
    return found if isinstance(found, dict) else {}


def _decode_status(content: bytes | None) -> object:
    """Return what came along with a refusal; None where it cannot be read, as if it had not."""
    if content is None:
        return None
    try:
        return _decode("status", Status, content)
    except GarbageError:
        return None


def _refused(path: str, refusal: Refusal) -> ApiError:
    text = f"nebius: {path} was refused: {refusal.code} {refusal.text[:300]}"
    return refusal.kind(f"{text}; {refusal.kind.advice}", code=refusal.code)
