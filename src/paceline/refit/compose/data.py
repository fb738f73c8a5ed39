"""The data plane: what a trainer serves through and an engine reads through, by name."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import system
from paceline.core.errors import PreflightError, UsageError
from paceline.core.registry import LazyEntry, load_entry
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.transports.protocol import ObjectReader
from paceline.refit.transports.registry import OBJECT_READERS, OBJECT_SERVERS
from paceline.refit.transports.routes import ROUTES_VARIABLE, Routes
from paceline.refit.transports.several import SeveralReaders, SeveralServers, Source

_SCHEMES: Mapping[str, Sequence[str]] = {
    "http": ("http", "https"),
    "nixl": ("nixl+http", "nixl+https"),
    "objectstore": ("s3", "gs", "az", "file"),
}
"""Transport -> schemes of the addresses that its reader takes."""
_BUCKETS: Mapping[str, LazyEntry] = {
    "objectstore": LazyEntry(
        "paceline.refit.transports.objectstore.bucket", "Bucket", "objectstore"
    ),
    "options": LazyEntry(
        "paceline.refit.transports.objectstore.bucket", "BucketOptions", "objectstore"
    ),
    "commits": LazyEntry(
        "paceline.refit.transports.objectstore.log", "CommitReader", "objectstore"
    ),
}
_AGENT = {"nixl": LazyEntry("paceline.refit.transports.nixl.agent", "NixlAgent", "nixl")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """Which transports a process uses, and what they need."""

    transports: tuple[str, ...] = ("http",)
    """The preferred first."""
    host: str = "127.0.0.1"
    """Where a trainer listens, and how others reach it."""
    port: int = 0
    """Where its HTTP server listens; 0 takes any."""
    bucket: str = ""
    """URL of the run's bucket and prefix, for ``objectstore``."""
    allow_http_bucket: bool = False
    """Admit a bucket's endpoint without TLS."""
    certificate: Path | None = None
    """PEM chain that a trainer's HTTP server proves itself with; plain text without one."""
    key: Path | None = None
    trusted: Path | None = None
    """PEM authorities that https:// sources are checked with; the system's without one."""
    server_name: str | None = None
    """What https:// sources must prove to be; the host that they are reached by without one."""
    routes: Path | None = None
    """A file of shorter ways to sources, see transports/routes.py."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.transports if name not in _SCHEMES]
        if unknown or not self.transports:
            raise UsageError(
                f"refit.transports {list(self.transports)}: write any of {', '.join(_SCHEMES)}"
            )
        if "objectstore" in self.transports and not self.bucket:
            raise UsageError(
                "the transport objectstore needs a bucket: set refit.bucket in the job file, or "
                "PACELINE_BUCKET, to s3://, gs://, az:// or file:// and a prefix"
            )


def data_plane(environ: Mapping[str, str], *, run_id: str) -> DataPlane:
    """Read the PACELINE_ variables about the data plane. Raises UsageError."""
    bucket = environ.get("PACELINE_BUCKET", "")
    paths: dict[str, Any] = {
        field: Path(environ[name]) for name, field in _PATHS.items() if environ.get(name)
    }
    return DataPlane(
        transports=tuple(environ.get("PACELINE_TRANSPORTS", "http").split(",")),
        host=environ.get("PACELINE_HOST", "127.0.0.1"),
        bucket=f"{bucket.rstrip('/')}/{run_id}" if bucket else "",
        allow_http_bucket=environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        **paths,
    )


_PATHS = {
    "PACELINE_DATA_CERTIFICATE": "certificate",
    "PACELINE_DATA_KEY": "key",
    "PACELINE_DATA_CA": "trusted",
    ROUTES_VARIABLE: "routes",
}


def open_source(plane: DataPlane, *, token: Callable[[], str], name: str) -> Source:
    """Return what a trainer serves through: every transport of ``plane``.

    Args:
        plane: which, and what they need.
        token: what readers must present.
        name: unique in the run.

    Raises:
        MissingExtraError: a transport's library is not installed.
        PreflightError: a port, a certificate or a bucket cannot be used. Nothing is left open.
    """
    with ExitStack() as parts:
        servers: list[Source] = []
        for transport in plane.transports:
            server = _server(transport, plane, token, name)
            parts.callback(server.close)
            servers.append(server)
        parts.pop_all()
    return SeveralServers(servers) if len(servers) > 1 else servers[0]


def open_reader(plane: DataPlane, *, token: Callable[[], str], name: str) -> ObjectReader:
    """Return what an engine reads through: the first of ``plane`` that works for a source.

    Raises:
        MissingExtraError: a transport's library is not installed.
        PreflightError: trusted certificates or a bucket cannot be used.
    """
    readers: dict[str, ObjectReader] = {}
    for transport in plane.transports:
        reader = _reader(transport, plane, token, name)
        readers |= dict.fromkeys(_SCHEMES[transport], reader)
    return SeveralReaders(readers, clock=system.system_clock())


def open_bucket(plane: DataPlane) -> Any:
    """Return the run's prefix of its bucket.

    Raises:
        UsageError: the run has none.
        PreflightError: it cannot be used.
    """
    if not plane.bucket:
        raise UsageError(
            "the canonical format is read from a bucket: set refit.bucket in the job file, or "
            "PACELINE_BUCKET"
        )
    return _bucket(plane.bucket, allow_http=plane.allow_http_bucket)


def is_bucket(address: str) -> bool:
    """Say whether a control service's address is a bucket to follow instead."""
    return address.partition("://")[0] in _SCHEMES["objectstore"] and "://" in address


def follow_bucket(url: str, *, allow_http: bool = False) -> ControlPlane:
    """Return a control plane that knows what the commits in a bucket say."""
    from paceline.refit.control.bucket import BucketControl

    reader_class: Any = load_entry(_BUCKETS, "commits", port="transport")
    commits = reader_class(_bucket(url, allow_http=allow_http))

    def newest() -> Any:
        return [(item.version, item.shards) for item in commits.newest().versions]

    return BucketControl(newest, clock=system.system_clock())


def _server(transport: str, plane: DataPlane, token: Callable[[], str], name: str) -> Source:
    server_class: Any = load_entry(OBJECT_SERVERS, transport, port="transport")
    found: Source
    if transport == "objectstore":
        found = server_class(_bucket(plane.bucket, allow_http=plane.allow_http_bucket))
    elif transport == "nixl":
        door = _server("http", plane, token, name)
        try:
            found = server_class(_agent(name), door)
        except BaseException:
            door.close()
            raise
    else:
        found = server_class(
            token=token, host=plane.host, port=plane.port, options=_http_options(plane)
        )
    return found


def _reader(transport: str, plane: DataPlane, token: Callable[[], str], name: str) -> ObjectReader:
    reader_class: Any = load_entry(OBJECT_READERS, transport, port="transport")
    clock = system.system_clock()
    found: ObjectReader
    if transport == "objectstore":
        found = reader_class(_bucket(plane.bucket, allow_http=plane.allow_http_bucket), clock=clock)
    elif transport == "nixl":
        found = reader_class(_agent(name), _reader("http", plane, token, name), clock=clock)
    else:
        options_class: Any = load_entry(_HTTP, "reader", port="transport")
        options = options_class(
            trusted=_trusted(plane.trusted),
            server_name=plane.server_name,
            routes=Routes(plane.routes),
        )
        found = reader_class(token=token, clock=clock, chance=system.chance, options=options)
    return found


_HTTP = {
    "reader": LazyEntry("paceline.refit.transports.http.reader", "HttpReaderOptions"),
    "server": LazyEntry("paceline.refit.transports.http.server", "HttpServerOptions"),
    "tls": LazyEntry("paceline.refit.transports.http.server", "HttpTlsFiles"),
}


def _http_options(plane: DataPlane) -> Any:
    options_class: Any = load_entry(_HTTP, "server", port="transport")
    if plane.certificate is None or plane.key is None:
        return options_class()
    files_class: Any = load_entry(_HTTP, "tls", port="transport")
    return options_class(tls=files_class(certificate=plane.certificate, key=plane.key))


def _agent(name: str) -> Any:
    agent_class: Any = load_entry(_AGENT, "nixl", port="transport")
    return agent_class(name)


def _bucket(url: str, *, allow_http: bool) -> Any:
    bucket_class: Any = load_entry(_BUCKETS, "objectstore", port="transport")
    options_class: Any = load_entry(_BUCKETS, "options", port="transport")
    return bucket_class(url, options=options_class(allow_http=allow_http))


def _trusted(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        raise PreflightError(f"cannot read {path}: {exc.strerror}") from exc
