"""The weight-transfer backend ``paceline``: the receiver's half that lives in every worker.

A version is fetched and proven in a thread while the model goes on generating. ``update_weights``
then only writes. vLLM's own calls drive it in order: init, start, update, finish.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.refit.errors import RefitError, UncertainStateError
from paceline.refit.generators.protocol import InstalledVersion
from paceline.refit.generators.vllm.aside import run_aside, step_aside
from paceline.refit.generators.vllm.part import ModelPart
from paceline.refit.generators.vllm.weights import DRAFT, WorkerWeights
from paceline.refit.generators.workers import Connect, Link, LinkConfig, Staged, WorkerStatus
from paceline.refit.kernels.registry import process_tools

log = logging.getLogger(__name__)

STOP_S = 25.0
"""Longer than the read of one chunk may take."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` is given: the fields of LinkConfig."""

    control: str
    model_name: str
    run_id: str
    worker_id: str
    credentials: str = ""
    transport: str = "http"
    allow_plaintext: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` is given."""

    version_id: str = ""
    """To apply; staged now if it has not been."""
    undo: bool = False
    """Take the last one back, because it failed in another worker."""
    timeout_s: float = 600.0
    """For staging to end, when it has not."""


class _StopError(Exception):
    """Ends staging between two reads because the engine shuts down."""


class PacelineWeightTransferEngine(WeightTransferEngine):
    """Installs versions of a run; ``connect`` is set by the plugin that registers the class."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    connect: ClassVar[Connect]

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Take the loaded model, as vLLM does it."""
        super().__init__(config, vllm_config, device, model)
        main = ModelPart(model, vllm_config=vllm_config, model_config=vllm_config.model_config)
        self._parts = {"": main}
        self._weights = WorkerWeights(self._parts, tools=process_tools())
        self._link: Link | None = None
        self._installed: InstalledVersion | None = None
        self._before: InstalledVersion | None = None
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._status = WorkerStatus()
        self._staged: Staged | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a run; whatever is live is none of its versions until one has been installed."""
        self.shutdown()
        self._weights.disown()
        self._installed = self._before = None
        self._note(WorkerStatus())
        rank = f"{self.parallel_config.data_parallel_index}.{self.parallel_config.rank}"
        given = {each.name: getattr(init_info, each.name) for each in fields(LinkConfig)}
        config = replace(LinkConfig(**given), worker_id=f"{init_info.worker_id}-w{rank}")
        self._stop = threading.Event()
        self._link = run_aside(lambda: type(self).connect(config))

    def follow_draft(self, model: Any, model_config: Any) -> None:
        """Let the draft model follow the tensors of a version whose names begin with ``draft.``."""
        if DRAFT not in self._parts:
            part = ModelPart(model, vllm_config=self.vllm_config, model_config=model_config)
            self._parts[DRAFT] = part
            self._weights = WorkerWeights(self._parts, tools=process_tools())
            self._installed = None

    def stage(self, version_id: str, *, known: frozenset[str] | None = None) -> None:
        """Begin to fetch a version in the background, unless that is done or going on."""
        with self._turn:
            if version_id in {self._status.staging, self._status.staged}:
                return
            if self._thread is not None and self._thread.is_alive():
                raise RefitError(f"version {self._status.staging} is being staged; wait for it")
            self._staged = None
            self._status = WorkerStatus(staging=version_id)
            self._thread = threading.Thread(
                target=self._stage, args=(version_id, known), name="paceline-stage", daemon=True
            )
            self._thread.start()

    def status(self) -> Mapping[str, Any]:
        """Return what WorkerStatus says, as plain data."""
        with self._turn:
            installed = None if self._installed is None else asdict(self._installed)
            return replace(self._status, installed=installed).as_dict()

    def ways(self) -> Mapping[str, str]:
        """Return how each parameter is reached: for people."""
        return self._weights.ways()

    def prove(self) -> str:
        """Hash everything and return the root digest; raises VerifyError."""
        return self._weights.prove()

    def start_weight_update(self) -> None:
        """Nothing has to be prepared: until ``update_weights`` the live weights are untouched."""
        self._joined()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Make a staged version live, or take the last one back.

        Raises:
            RefitError: it was not staged, or not applied; what was live before still is.
            UncertainStateError: nobody knows what is live; do not resume before a full version.
        """
        if update_info.undo:
            if self._weights.undo():
                self._installed = self._before
            return
        staged = self._take(update_info)
        try:
            self._weights.apply(staged.install, root=staged.version.root_digest)
        except UncertainStateError:
            self._installed = None
            raise
        self._before, self._installed = self._installed, staged.version

    def finish_weight_update(self) -> None:
        """Every worker has the version: it cannot be taken back any more."""
        self._weights.settle()

    def shutdown(self) -> None:
        """Stop staging and leave the run; the engine serves on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if self._link is not None:
            self._link.close()
        self._link = None

    def _take(self, wanted: UpdateInfo) -> Staged:
        self.stage(wanted.version_id)
        if self._thread is not None:
            self._thread.join(wanted.timeout_s)
        with self._turn:
            staged, status = self._staged, self._status
            if status.staging:
                raise DeadlineExceededError(f"{status.staging} is not staged yet")
            if staged is None:
                self._status = WorkerStatus()
                raise RefitError(status.error)
            self._staged, self._status = None, WorkerStatus()
        return staged

    def _stage(self, version_id: str, known: frozenset[str] | None) -> None:
        """Run in the thread; ends with a staged version or a reason why there is none."""
        try:
            step_aside()
            staged = self._joined().stage(
                version_id, mirror=self._weights, between_reads=self._check_stop, known=known
            )
        except (_StopError, PacelineError) as exc:
            self._note(WorkerStatus(error=str(exc) or "stopped", error_kind=type(exc).__name__))
        except Exception as exc:
            log.exception("staging %s failed", version_id)
            self._note(WorkerStatus(error=repr(exc), error_kind=type(exc).__name__))
        else:
            status = WorkerStatus(staged=version_id, fetched_bytes=staged.fetched_bytes)
            self._note(status, staged)

    def _joined(self) -> Link:
        if self._link is None:
            raise RefitError("init_weight_transfer_engine comes first")
        return self._link

    def _note(self, status: WorkerStatus, staged: Staged | None = None) -> None:
        with self._turn:
            self._status, self._staged = status, staged

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _StopError
