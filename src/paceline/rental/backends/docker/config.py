"""Typed options."""

from dataclasses import dataclass
from enum import StrEnum


class GpuRequests(StrEnum):
    """How an engine is asked for GPUs."""

    AUTO = "auto"
    """By CDI where the engine knows devices by it, else by the nvidia runtime."""
    RUNTIME = "runtime"
    CDI = "cdi"


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerConfig:
    """What containers are made with."""

    command: tuple[str, ...] = ("docker",)
    """The engine's command line; which engine it speaks to is its own matter (contexts)."""
    image: str = "ubuntu:24.04"
    """For a role that names none. It needs a POSIX shell, setsid and tar."""
    network: str = "host"
    """The roles of a run talk over the loopback of one computer."""
    shm_gb: int = 8
    """Shared memory; the engine's own 64 MB is too small for data loaders."""
    gpu_requests: GpuRequests = GpuRequests.AUTO
