"""Every call of both services as a value, read from the descriptors, with strict parsing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message

from paceline.refit.errors import InvalidRequestError
from paceline.refit.wire import health_pb2, paceline_refit_v1_pb2, refit_pb2

__all__ = [
    "CONTROL_RPCS",
    "HEALTH_SERVICE",
    "OWN_SERVICE",
    "PUBLIC_SERVICE",
    "RPCS",
    "WORKER_SERVICE",
    "Message",
    "Rpc",
    "rpc_named",
]

PUBLIC_SERVICE: Final = "model_express.refit.RefitService"
WORKER_SERVICE: Final = "model_express.refit.RefitWorkerService"
OWN_SERVICE: Final = "paceline.refit.v1.ControlService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """One call: one request, and one reply or a stream of them."""

    service: str
    name: str
    request: type[Message]
    reply: type[Message]
    is_stream: bool = False

    @property
    def path(self) -> str:
        """The HTTP/2 path that gRPC calls a method by."""
        return f"/{self.service}/{self.name}"

    def parse_request(self, raw: bytes) -> Message:
        """Return the request in ``raw``. Raises InvalidRequestError for bytes that are none."""
        return _parse(self.request, raw)

    def parse_reply(self, raw: bytes) -> Message:
        """Return the reply in ``raw``. Raises InvalidRequestError for bytes that are none."""
        return _parse(self.reply, raw)


def _parse(kind: type[Message], raw: bytes) -> Message:
    try:
        return kind.FromString(raw)
    except DecodeError as exc:
        raise InvalidRequestError(f"these {len(raw)} bytes are no {kind.__name__}") from exc


def _rpcs(file: FileDescriptor) -> Iterator[Rpc]:
    for service in file.services_by_name.values():
        for method in service.methods:
            yield Rpc(
                service=service.full_name,
                name=method.name,
                request=message_factory.GetMessageClass(method.input_type),
                reply=message_factory.GetMessageClass(method.output_type),
                is_stream=method.server_streaming,
            )


RPCS: Final[Mapping[str, Rpc]] = {
    rpc.path: rpc
    for file in (refit_pb2.DESCRIPTOR, paceline_refit_v1_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for rpc in _rpcs(file)
}
"""Path -> call, of all services."""

CONTROL_RPCS: Final = tuple(
    rpc for rpc in RPCS.values() if rpc.service in (PUBLIC_SERVICE, OWN_SERVICE)
)
"""What the central service answers to those who have a token."""


def rpc_named(service: str, name: str) -> Rpc:
    """Return one call; KeyError if there is none."""
    return RPCS[f"/{service}/{name}"]
