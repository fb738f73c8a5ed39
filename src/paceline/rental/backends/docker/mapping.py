"""Offers, containers and command lines of the engine as values and back. Pure and total."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from paceline.core.errors import UsageError
from paceline.rental.backends.docker.config import DockerConfig, GpuRequests
from paceline.rental.catalogue import GpuTarget, parse_target
from paceline.rental.errors import NoOffersError, ProvisionError
from paceline.rental.model import (
    InstanceHandle,
    InstanceState,
    InstanceStatus,
    Offer,
    OfferConstraints,
)

BACKEND = "local-docker"
LABEL = "io.paceline.label"
TARGET_LABEL = "io.paceline.gpu"
DEVICES_LABEL = "io.paceline.devices"
WORKSPACE = "/workspace"
JOBS = "/tmp/.paceline/jobs"  # noqa: S108 - inside the container, which is ours
_CPU = "cpu"
_LOOPBACK_MBPS = 10_000.0
_INSTANCE_ID = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}")
_FIRST_PROCESS = 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done'
_STATES = {
    "created": InstanceState.LOADING,
    "restarting": InstanceState.LOADING,
    "running": InstanceState.RUNNING,
    "paused": InstanceState.STOPPED,
    "exited": InstanceState.STOPPED,
}
"""``removing`` and ``dead`` are unknown: neither usable nor seen gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of the computer that the engine runs on."""

    index: str
    kind: str
    """Canonical, ``rtx4090``; empty for one that we have no word for."""
    ram_gb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an engine said of itself."""

    num_cpus: int
    ram_gb: int
    root: str
    """Where it keeps its data; on another computer's disk if the engine is there."""
    has_runtime: bool
    has_cdi: bool


def parse_engine(info: Mapping[str, object]) -> Engine:
    """Return what ``docker info`` means; what is missing counts as nothing."""
    runtimes = info.get("Runtimes")
    devices = info.get("DiscoveredDevices")
    cdi = isinstance(devices, Sequence) and any(
        isinstance(device, Mapping)
        and device.get("Source") == "cdi"
        and str(device.get("ID", "")).startswith("nvidia.com/gpu=")
        for device in devices
    )
    return Engine(
        num_cpus=_int(info.get("NCPU")),
        ram_gb=_int(info.get("MemTotal")) // 10**9,
        root=str(info.get("DockerRootDir") or "/"),
        has_runtime=isinstance(runtimes, Mapping) and "nvidia" in runtimes,
        has_cdi=cdi,
    )


def parse_gpus(csv: str) -> list[Gpu]:
    """Return the GPUs of ``nvidia-smi --query-gpu=index,name,memory.total``."""
    gpus = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():  # noqa: PLR2004 - the three that were asked for
            ram_mb = _int(fields[2].removesuffix("MiB").strip())
            kind = gpu_kind(fields[1], ram_gb=round(ram_mb / 1024))
            gpus.append(Gpu(index=fields[0], kind=kind, ram_gb=round(ram_mb / 1024)))
    return gpus


def gpu_kind(name: str, *, ram_gb: int) -> str:
    """Return the canonical word for a GPU's own name, ``NVIDIA GeForce RTX 4090``.

    The words are the catalogue's: family and number, and the memory where a name stands for two.
    """
    words = re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+", name.lower().replace("-", " "))
    words = [word for word in words if word not in ("nvidia", "geforce", "tesla")]
    if "pro" in words and "6000" in words and "blackwell" in words:
        return "blackwell6000"
    if words[:1] == ["rtx"] and len(words) > 1:
        return "".join(words[:2]) + ("ada" if "ada" in words else "")
    if not words:
        return ""
    if words[0] == "a100":
        return "a100-80gb" if ram_gb > 60 else "a100-40gb"  # noqa: PLR2004 - between 40 and 80
    return str(words[0])


def offers_of(
    c: OfferConstraints, engine: Engine, gpus: Sequence[Gpu], *, free_disk_gb: float
) -> list[Offer]:
    """Return the one offer there is for what is asked.

    Raises:
        NoOffersError: the engine cannot give it; says what is missing.
    """
    try:
        target = parse_target(c.gpu_target)
    except UsageError as exc:
        raise NoOffersError(f"{BACKEND}: {exc}") from exc
    if c.max_dph is not None and c.max_dph < 0:
        raise NoOffersError(f"{BACKEND} costs nothing, max_dph {c.max_dph} is below that")
    if c.min_disk_gb > free_disk_gb:
        raise NoOffersError(
            f"{BACKEND} has {free_disk_gb:.0f} GB of free disk, {c.min_disk_gb} GB are asked for"
        )
    if target.gpu == _CPU:
        _refuse_cpus(target, engine)
        return [_offer(target, ram_gb=engine.ram_gb, disk_gb=free_disk_gb)]
    fitting = [gpu for gpu in gpus if gpu.kind == target.gpu]
    if len(fitting) < target.count:
        raise NoOffersError(f"{BACKEND} has {len(fitting)} {target.gpu}, {target} is asked for")
    if not (engine.has_runtime or engine.has_cdi):
        raise NoOffersError(
            f"{BACKEND}: the engine cannot give GPUs to containers; install "
            "nvidia-container-toolkit and restart it"
        )
    ram_gb = sum(gpu.ram_gb for gpu in fitting[: target.count])
    return [_offer(target, ram_gb=ram_gb, disk_gb=free_disk_gb)]


def parse_offer_id(offer_id: str) -> GpuTarget:
    """Return what an offer is for. Raises ProvisionError for one that we never made."""
    try:
        return parse_target(offer_id)
    except UsageError as exc:
        raise ProvisionError(f"{BACKEND} has no offer {offer_id!r}; ask for offers again") from exc


def pick_devices(target: GpuTarget, gpus: Sequence[Gpu], taken: frozenset[str]) -> tuple[str, ...]:
    """Return the GPUs for a new container; none for a target without.

    Raises:
        ProvisionError: fewer are free.
    """
    if target.gpu == _CPU:
        return ()
    free = [gpu.index for gpu in gpus if gpu.kind == target.gpu and gpu.index not in taken]
    if len(free) < target.count:
        raise ProvisionError(
            f"{BACKEND}: {len(free)} {target.gpu} are free, {target} is asked for; end another "
            "machine or wait"
        )
    return tuple(free[: target.count])


def create_words(
    *, image: str, label: str, target: GpuTarget, devices: Sequence[str], words: Sequence[str]
) -> list[str]:
    """Return the arguments of ``docker create``.

    The container's name is the label where the engine takes it as one, so that a label cannot be
    used twice; without an entry point of the image, since what it runs is none of ours.
    """
    name = ["--name", label] if _NAME.fullmatch(label) else []
    labels = {LABEL: label, TARGET_LABEL: str(target), DEVICES_LABEL: ",".join(devices)}
    return [
        "create",
        "--pull=never",
        *name,
        *(f"--label={key}={value}" for key, value in labels.items()),
        f"--workdir={WORKSPACE}",
        *words,
        "--entrypoint=sh",
        image,
        "-c",
        _FIRST_PROCESS,
    ]


def option_words(config: DockerConfig, engine: Engine, devices: Sequence[str]) -> list[str]:
    """Return what the options and the GPUs add to ``docker create``."""
    words = [f"--network={config.network}", f"--shm-size={config.shm_gb}g"]
    if not devices:
        return words
    by_cdi = config.gpu_requests is GpuRequests.CDI or (
        config.gpu_requests is GpuRequests.AUTO and engine.has_cdi
    )
    if by_cdi:
        return [*words, *(f"--device=nvidia.com/gpu={device}" for device in devices)]
    # The value is read as CSV: without its own quotes the list would end at the first comma.
    return [*words, f'--gpus="device={",".join(devices)}"']


def is_instance_id(text: str) -> bool:
    """Return whether a container of ours could have this id; others reach no command line."""
    return _INSTANCE_ID.fullmatch(text) is not None


def parse_containers(text: str) -> list[Mapping[str, object]]:
    """Return what ``docker inspect`` printed; nothing for what is no list of objects."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [container for container in found if isinstance(container, Mapping)]


def label_of(container: Mapping[str, object]) -> str | None:
    """Return our label, None for a container that is not ours."""
    value = _labels(container).get(LABEL)
    return None if value is None else str(value)


def devices_of(container: Mapping[str, object]) -> frozenset[str]:
    """Return the GPUs that a container was made with."""
    return frozenset(filter(None, str(_labels(container).get(DEVICES_LABEL, "")).split(",")))


def handle_of(container: Mapping[str, object]) -> InstanceHandle:
    """Return how others name the container."""
    created_s = _seconds(container.get("Created"))
    label = label_of(container) or ""
    return InstanceHandle(BACKEND, str(container.get("Id", "")), label, created_s or 0.0)


def status_of(container: Mapping[str, object] | None, *, now_s: float) -> InstanceStatus:
    """Return the status of a container; None is one that does not exist."""
    if container is None:
        return InstanceStatus(InstanceState.DESTROYED.value, "", 0, None, None, {})
    found = container.get("State")
    said = found if isinstance(found, Mapping) else {}
    state = _STATES.get(str(said.get("Status")), InstanceState.UNKNOWN)
    started_s = _seconds(said.get("StartedAt")) if state is InstanceState.RUNNING else None
    gpu, _, count = str(_labels(container).get(TARGET_LABEL, "")).rpartition("-")
    return InstanceStatus(
        state=state.value,
        gpu_name=gpu,
        num_gpus=_int(count.removesuffix("x")),
        uptime_s=None if started_s is None else max(0.0, now_s - started_s),
        public_endpoint=None,
        raw={"state": dict(said), "name": str(container.get("Name", "")).lstrip("/")},
    )


def _refuse_cpus(target: GpuTarget, engine: Engine) -> None:
    if target.count > engine.num_cpus:
        raise NoOffersError(f"{BACKEND} has {engine.num_cpus} CPUs, {target} asks for more")


def _offer(target: GpuTarget, *, ram_gb: int, disk_gb: float) -> Offer:
    return Offer(
        backend=BACKEND,
        id=str(target),
        gpu_name=target.gpu,
        num_gpus=target.count,
        gpu_total_ram_gb=ram_gb,
        dph=0.0,
        reliability=1.0,
        inet_down_mbps=_LOOPBACK_MBPS,
        disk_space_gb=disk_gb,
        geolocation="here",
        raw={"synthetic": ["reliability", "inet_down_mbps"]},
    )


def _labels(container: Mapping[str, object]) -> Mapping[str, object]:
    config = container.get("Config")
    labels = config.get("Labels") if isinstance(config, Mapping) else None
    return labels if isinstance(labels, Mapping) else {}


def _seconds(text: object) -> float | None:
    """Return Unix seconds of a time as the engine writes it; its year 1 means never."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", str(text))
    if found is None or found.group(1).startswith("0001"):
        return None
    try:
        return datetime.fromisoformat(
            found.group(1) + found.group(2).replace("Z", "+00:00")
        ).timestamp()
    except (ValueError, OverflowError):
        return None


def _int(value: object) -> int:
    try:
        return max(0, int(str(value)))
    except ValueError:
        return 0
