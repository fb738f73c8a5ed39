"""This process's NIXL agent: registered memory, known peers, reads; the only caller of NIXL.

A region is registered as long as somebody needs it. NIXL carries no versions, no integrity and no
authentication: whoever holds an agent's metadata may read what it has registered, so metadata is
handed out behind a token, and no agent belongs on a network that is not trusted.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from nixl import _bindings as bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from nixl._bindings import (
    nixlAgentConfig,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

from paceline.core.errors import PreflightError
from paceline.refit.errors import FetchError, PublishError

if TYPE_CHECKING:
    import torch

DRAM, VRAM = "DRAM", "VRAM"
_ERRORS = (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
    RuntimeError,
)


_LOOK_ANYWAY_US = 1000
"""How long NIXL's thread waits for something to come before it looks by itself."""
_building = threading.Lock()


class _SleepingConfig(nixlAgentConfig):  # type: ignore[misc] # NIXL has no types
    """Has a delay, where NIXL's own front always sets 0: that is a thread that takes a core."""

    @property
    def pthrDelay(self) -> int:  # noqa: N802 - NIXL's word
        return int(nixlAgentConfig.pthrDelay.__get__(self))

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:  # noqa: N802 - NIXL's word
        nixlAgentConfig.pthrDelay.__set__(self, value or _LOOK_ANYWAY_US)


@contextmanager
def _thread_that_sleeps() -> Iterator[None]:
    """Let agents have the configuration above while they are made."""
    with _building:
        bindings.nixlAgentConfig = _SleepingConfig
        try:
            yield
        finally:
            bindings.nixlAgentConfig = nixlAgentConfig


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A stretch of memory."""

    address: int
    size: int
    memory: str = DRAM
    device: int = 0

    @property
    def stop(self) -> int:
        """The address behind it."""
        return self.address + self.size

    def covers(self, other: "Region") -> bool:
        """Say whether ``other`` lies inside."""
        same = (self.memory, self.device) == (other.memory, other.device)
        return same and self.address <= other.address and other.stop <= self.stop

    def adjoins(self, other: "Region") -> bool:
        """Say whether ``other`` begins where this ends."""
        same = (self.memory, self.device) == (other.memory, other.device)
        return same and self.stop == other.address

    def joined(self, other: "Region") -> "Region":
        """Return both as one; ``other`` adjoins."""
        return replace(self, size=self.size + other.size)

    def split(self, size: int) -> "tuple[Region, Region]":
        """Return the first so many bytes, and the rest."""
        return replace(self, size=size), replace(
            self, address=self.address + size, size=self.size - size
        )


class NixlAgent:
    """Signs NixlMetadataProvider; safe from several threads."""

    def __init__(self, name: str, *, backend: str = "UCX", listen_port: int | None = None) -> None:
        """Start an agent.

        Args:
            name: unique among all that meet.
            backend: NIXL's word, ``UCX`` or ``LIBFABRIC``.
            listen_port: where peers fetch its metadata by NIXL's own protocol, which asks for no
                token; None, the default, is nowhere.

        Raises:
            PreflightError: NIXL cannot start it.
        """
        self._name = name
        self._listen_port = listen_port
        config: dict[str, Any] = {} if listen_port is None else {"listen_port": listen_port}
        try:
            with _thread_that_sleeps():
                self._nixl: Any = nixl_agent(
                    name,
                    nixl_agent_config(
                        backends=[backend],
                        enable_listen_thread=listen_port is not None,
                        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                        **config,
                    ),
                )
        except _ERRORS as exc:
            raise PreflightError(
                f"NIXL cannot start an agent over {backend}: {exc}; check its installation, or "
                "take nixl out of refit.transports"
            ) from exc
        self._registered: dict[Region, tuple[object, int]] = {}
        """Region -> NIXL's handle, and how many need it."""
        self._pinned: list[object] = []
        self._lock = threading.Lock()

    @property
    def agent_name(self) -> str:
        """Name of this agent."""
        return self._name

    @property
    def nixl_metadata(self) -> bytes:
        """Its serialized metadata, all registrations included."""
        with _refusing(PublishError, "reading an agent's metadata"):
            found: bytes = self._nixl.get_agent_metadata()
            return found

    @property
    def listen_port(self) -> int | None:
        """Port of its metadata listener, None when it has none."""
        return self._listen_port

    def register_tensors(self, tensors: "dict[str, torch.Tensor]") -> bytes:
        """Register buffers for as long as the agent lives, and return the metadata now.

        What lies inside them is not registered again when it is served.

        Raises:
            ValueError: a tensor is not one dense block.
            PublishError: NIXL refuses one, such as memory of expandable CUDA segments.
        """
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {name!r} is not one dense block; register its arena")
        self.register([region_of_tensor(tensor) for tensor in tensors.values()])
        self._pinned.append(tensors)
        return self.nixl_metadata

    def register(self, regions: Sequence[Region]) -> None:
        """Make regions readable, each once more than before. Raises PublishError for none."""
        with self._lock:
            done: list[Region] = []
            try:
                for region in regions:
                    self._hold(region)
                    done.append(region)
            except _ERRORS as exc:
                for region in done:
                    self._let_go(region)
                raise PublishError(
                    f"NIXL cannot register {region.size} bytes of {region.memory}: {exc}; memory "
                    "on a device must be one plain allocation"
                ) from exc

    def deregister(self, regions: Sequence[Region]) -> None:
        """Take ``register`` back. Only when no lease lives: readers are not visible here."""
        with self._lock, _refusing(PublishError, "deregistering"):
            for region in regions:
                self._let_go(region)

    def metadata_of(self, regions: Sequence[Region]) -> bytes:
        """Return metadata that covers these registered regions and says how to connect."""
        with self._lock, _refusing(PublishError, "reading an agent's metadata"):
            holders = sorted({self._holder_of(region) for region in regions})
            if len({region.memory for region in holders}) != 1:
                whole: bytes = self._nixl.get_agent_metadata()
                return whole
            descs = self._nixl.get_reg_descs(
                [(each.address, each.size, each.device, "") for each in holders],
                holders[0].memory,
            )
            found: bytes = self._nixl.get_partial_agent_metadata(descs, True, [])  # noqa: FBT003
            return found

    def meet(self, metadata: bytes, name: str) -> None:
        """Learn of a peer, or of more that it registered. Raises FetchError."""
        with _refusing(FetchError, f"meeting {name}"):
            found = self._nixl.add_remote_agent(metadata)
            said = found.decode() if isinstance(found, bytes) else found
        if said != name:
            raise FetchError(f"the metadata of {name} is that of {said}")

    def part_with(self, name: str) -> None:
        """Disconnect a peer; what is on its way from it is lost. Never raises."""
        try:
            self._nixl.remove_remote_agent(name)
        except _ERRORS:
            return  # it is gone already, which is what was wanted

    def prepare(self, name: str, local: Sequence[Region], remote: Sequence[Region]) -> object:
        """Return a read of ``remote`` into ``local``, one by one; it may be posted many times.

        Raises:
            FetchError: the peer has not registered that, or is gone.
        """
        with _refusing(FetchError, f"preparing a read from {name}"):
            mine, theirs = _rows(local), _rows(remote)
            return self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(mine, local[0].memory),
                self._nixl.get_xfer_descs(theirs, remote[0].memory),
                name,
            )

    def post(self, read: object) -> bool:
        """Begin a prepared read; True if it is done already. Raises FetchError."""
        with _refusing(FetchError, "reading"):
            return _is_done(self._nixl.transfer(read))

    def poll(self, read: object) -> bool:
        """Say whether a read is done. Raises FetchError if it failed."""
        with _refusing(FetchError, "reading"):
            return _is_done(self._nixl.check_xfer_state(read))

    def forget(self, read: object) -> bool:
        """Give a read back; False if it is under way and cannot be ended."""
        try:
            self._nixl.release_xfer_handle(read)
        except _ERRORS:
            return False
        return True

    def _holder_of(self, region: Region) -> Region:
        for known in self._registered:
            if known.covers(region):
                return known
        raise PublishError(f"{region.size} bytes of {region.memory} are not registered")

    def _hold(self, region: Region) -> None:
        holder = next((known for known in self._registered if known.covers(region)), region)
        handle, count = self._registered.get(holder, (None, 0))
        if not count:
            rows = [(region.address, region.size, region.device, "")]
            handle = self._nixl.register_memory(rows, region.memory)
        self._registered[holder] = (handle, count + 1)

    def _let_go(self, region: Region) -> None:
        holder = next(
            (known for known in self._registered if known == region),
            next((known for known in self._registered if known.covers(region)), None),
        )
        if holder is None:
            return
        handle, count = self._registered[holder]
        if count > 1:
            self._registered[holder] = (handle, count - 1)
            return
        del self._registered[holder]
        self._nixl.deregister_memory(handle)


def region_of(data: memoryview) -> Region:
    """Return where a host buffer lies."""
    return Region(np.frombuffer(data, dtype=np.uint8).ctypes.data, data.nbytes)


def region_of_tensor(tensor: "torch.Tensor") -> Region:
    """Return where a dense tensor lies, on the host or on a device."""
    size = tensor.numel() * tensor.element_size()
    device = tensor.get_device()
    return Region(tensor.data_ptr(), size, DRAM if device < 0 else VRAM, max(device, 0))


def _rows(regions: Sequence[Region]) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    rows = [(each.address, each.size, each.device) for each in regions]
    return np.array(rows, dtype=np.uint64)


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise FetchError("the read failed on its way; the peer or the link is gone")
    return state == "DONE"


@contextmanager
def _refusing(error: type[FetchError] | type[PublishError], what: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as exc:
        raise error(f"NIXL failed {what}: {exc}; try another source or transport") from exc
