"""A trainer process's ways into its run: publish weights, get rollouts, tell what happens."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import system
from paceline.core.errors import PreflightError, UsageError
from paceline.core.registry import load_entry
from paceline.refit.compose.control import connect_control, load_credentials
from paceline.refit.compose.data import DataPlane, data_plane, open_bucket, open_source
from paceline.refit.compose.supply import signer, with_run_tls
from paceline.refit.control import auth
from paceline.refit.control.protocol import ControlPlane, SupportsVersionWatch
from paceline.refit.delta.choice import LOCAL, Link
from paceline.refit.errors import ControlError
from paceline.refit.model import Event, TrainerStagingMode, WeightPayloadFormat
from paceline.refit.publisher.values import WhenInPlace, WhenLeased, WhenUnproven
from paceline.refit.trainers.dtypes import WireDtypes
from paceline.refit.trainers.registry import TRAINER_ENGINES
from paceline.refit.transports.routes import Routes

if TYPE_CHECKING:
    from paceline.refit.publisher import CanonicalPublisher, Publisher, PublisherOptions
    from paceline.refit.rollouts import RolloutClient
    from paceline.refit.trainers.protocol import Quantise
    from paceline.refit.transports.several import Source

log = logging.getLogger(__name__)
_E = TypeVar("_E", bound=Enum)


class PublishedFormat(StrEnum):
    """Who can read what is published."""

    PACELINE = "paceline"
    CANONICAL = "canonical"
    """ModelExpress's receivers, from a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a role process of a run is told through its environment."""

    run_id: str
    model_name: str
    control: str
    """Address of the control service, ``host:port``."""
    role: str = "trainer"
    index: int = 0
    payload_format: WeightPayloadFormat = WeightPayloadFormat.XOR_DELTA
    format: PublishedFormat = PublishedFormat.PACELINE
    staging_mode: TrainerStagingMode = TrainerStagingMode.COPY_TO_HOST
    when_leased: WhenLeased = WhenLeased.BLOCK
    when_in_place: WhenInPlace = WhenInPlace.WAIT
    when_unproven: WhenUnproven = WhenUnproven.ANCHOR
    anchor_every: int = 8
    max_staleness: int = 2
    link_mbps: float | None = None
    """Megabits per second to the slowest engine; None: one machine or a fast network."""
    host: str = "127.0.0.1"
    """Where this process listens, and how others reach it."""
    data: DataPlane = field(default_factory=DataPlane)
    """What weights are served through."""
    port: int = 0
    """Where its first process listens, the others of one machine behind it; 0 is any."""
    local_rank: int = 0
    """Which process of its machine it is."""
    world_size: int = 0
    """How many processes train together, as torchrun says; 0: it did not start this one."""
    incarnation: str = ""
    """What torchrun calls this start of all of them."""
    out: Path = Path("out")
    """What is written there is pulled when the run ends."""
    resume_from: Path | None = None
    """What was kept of this trainer's files before it was started again; None at first."""


def run_settings(environ: Mapping[str, str]) -> RunSettings:
    """Read the PACELINE_ variables of a role process.

    Raises:
        PreflightError: one that is needed is missing.
        UsageError: one says something that it cannot say.
    """
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise PreflightError(
            f"this process is not part of a run: {', '.join(missing)} not set; start it from a job "
            "file with `paceline up`, or set what docs/guides/refit-alone.md lists"
        )
    given = {
        field: convert(environ[name])
        for name, (field, convert) in _VARIABLES.items()
        if environ.get(name)
    }
    return RunSettings(
        **given,
        incarnation="/".join(environ[name] for name in _INCARNATION if name in environ),
        data=data_plane(environ, run_id=environ["PACELINE_RUN_ID"]),
    )


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise UsageError(f"{text!r} in a PACELINE_ variable is no whole number") from exc


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UsageError(f"{text!r} in a PACELINE_ variable is no rate above 0")
    return rate


def _member(enum: type[_E], text: str) -> _E:
    try:
        return enum(text)
    except ValueError as exc:
        known = ", ".join(str(each.value) for each in enum)
        raise UsageError(f"{text!r} in a PACELINE_ variable is none of {known}") from exc


_INCARNATION = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_NEEDED = ("PACELINE_RUN_ID", "PACELINE_MODEL", "PACELINE_CONTROL")
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "PACELINE_RUN_ID": ("run_id", str),
    "PACELINE_MODEL": ("model_name", str),
    "PACELINE_CONTROL": ("control", str),
    "PACELINE_ROLE": ("role", str),
    "PACELINE_INDEX": ("index", _number),
    "PACELINE_PAYLOAD": ("payload_format", partial(_member, WeightPayloadFormat)),
    "PACELINE_FORMAT": ("format", partial(_member, PublishedFormat)),
    "PACELINE_STAGING": ("staging_mode", partial(_member, TrainerStagingMode)),
    "PACELINE_WHEN_LEASED": ("when_leased", partial(_member, WhenLeased)),
    "PACELINE_WHEN_IN_PLACE": ("when_in_place", partial(_member, WhenInPlace)),
    "PACELINE_WHEN_UNPROVEN": ("when_unproven", partial(_member, WhenUnproven)),
    "PACELINE_ANCHOR_EVERY": ("anchor_every", _number),
    "PACELINE_MAX_STALENESS": ("max_staleness", _number),
    "PACELINE_LINK_MBPS": ("link_mbps", _rate),
    "PACELINE_HOST": ("host", str),
    "PACELINE_PORT": ("port", _number),
    "LOCAL_RANK": ("local_rank", _number),
    "WORLD_SIZE": ("world_size", _number),
    "PACELINE_OUT": ("out", Path),
    "PACELINE_RESUME_FROM": ("resume_from", Path),
}


class TrainerConnection:
    """A trainer process's ways into its run: publish weights, get rollouts, tell what happens."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        control: ControlPlane,
        credentials: auth.Credentials,
        parts: ExitStack,
    ) -> None:
        self.settings = settings
        self.worker_id = f"{settings.run_id}-{settings.role}-{settings.index}-{system.new_nonce()}"
        self._control = control
        self._credentials = credentials
        self._parts = parts
        self._clock = system.system_clock()

    @property
    def out(self) -> Path:
        """Where artifacts go; made on first use."""
        self.settings.out.mkdir(parents=True, exist_ok=True)
        return self.settings.out

    @property
    def resume_from(self) -> Path | None:
        """Where the newest files of the job's ``artifacts.pull`` are, when it starts again."""
        found = self.settings.resume_from
        return found if found is not None and found.is_dir() else None

    def publisher(
        self,
        tensors: object,
        *,
        wire_dtypes: WireDtypes = None,
        quantise: "Quantise | None" = None,
        mesh: object = None,
        alone: bool = False,
        engine: str = "",
        **options: object,
    ) -> "Publisher | CanonicalPublisher":
        """Return a publisher of ``tensors`` that is not started yet: enter it, or call start().

        Where torchrun started several processes, each of them makes one and publishes its own part
        of every version; nothing is gathered.

        Args:
            tensors: a ``torch.nn.Module``, also a ``PeftModel``, or a mapping name -> tensor.
            wire_dtypes: glob over names -> dtype word, e.g. ``{"*": "BF16"}`` for fp32 masters
                behind bf16 engines; or a ``DtypePolicy``. Nothing is cast that is not named here.
            quantise: turns a tensor into the codes and scales that the engines serve, see
                ``paceline.refit.trainers.quantise``.
            mesh: the ``DeviceMesh`` of all processes, where no tensor lies on all of it.
            alone: this process publishes all of the tensors, whatever others there are.
            engine: a name of the trainer adapter, where it is not plain from the tensors, such as
                ``megatron`` or ``deepspeed``; docs/guides/trainers.md lists them.
            options: the adapter's own, such as ``publishes="alone"`` for the LoRA of a
                ``PeftModel``, which is published merged otherwise.

        Raises:
            MissingExtraError: torch is not installed.
            PreflightError: the port cannot be listened on.
            UsageError: a LoRA alone, in a format that has none.
            ValueError: the tensors or the policy do not fit.
        """
        engine = engine or _engine_of(tensors, is_shared=self.settings.world_size > 0 and not alone)
        if engine == "sharded":
            options["mesh"] = mesh
        options |= {"wire_dtypes": wire_dtypes, "quantise": quantise}
        made = partial(self._trainer, tensors, engine, options)
        how = self._publisher_options(_config_of(tensors))
        if self.settings.format is not PublishedFormat.CANONICAL:
            return self._open_publisher(made, how)
        if self.settings.world_size > 1 and not alone:
            raise UsageError(
                "canonical versions have one source: publish from one process, with alone=True"
            )
        if options.get("publishes") == "alone":
            raise UsageError("the canonical format has no LoRAs: publish it merged")
        return self._open_canonical(made, how)

    def _publisher_options(self, files: Mapping[str, bytes]) -> "PublisherOptions":
        from paceline.refit.publisher import PublisherOptions

        settings = self.settings
        return PublisherOptions(
            model_name=settings.model_name,
            run_id=settings.run_id,
            worker_id=self.worker_id,
            staging_mode=settings.staging_mode,
            payload_format=settings.payload_format,
            anchor_every=settings.anchor_every,
            when_leased=settings.when_leased,
            when_in_place=settings.when_in_place,
            when_unproven=settings.when_unproven,
            sign=signer(self._credentials),
            checkpoint_files=files,
            incarnation=settings.incarnation,
        )

    def _open_canonical(
        self, made: Callable[..., Any], how: "PublisherOptions"
    ) -> "CanonicalPublisher":
        from paceline.refit.publisher import CanonicalPublisher

        return CanonicalPublisher(
            control=self._control,
            trainer=made(storage=None),
            bucket=open_bucket(self.settings.data),
            clock=self._clock,
            options=how,
            notify=self.notify,
        )

    def _open_publisher(self, made: Callable[..., Any], how: "PublisherOptions") -> "Publisher":
        """Listen, and bind the tensors. Raises PreflightError, and what the adapter raises."""
        from paceline.refit.publisher import Publisher

        settings = self.settings
        port = settings.port + settings.local_rank if settings.port else 0
        server = open_source(
            with_run_tls(replace(settings.data, port=port), self._credentials, self._parts),
            token=lambda: self._credentials.data_token,
            name=f"{self.worker_id}-source",
        )
        with ExitStack() as undo:
            undo.callback(server.close)
            trainer = made(storage=server)
            undo.pop_all()
        self._parts.callback(server.close)
        return Publisher(
            control=self._control,
            trainer=trainer,
            source=server,
            clock=self._clock,
            options=how,
            notify=self.notify,
        )

    def _trainer(
        self,
        tensors: object,
        engine: str,
        options: Mapping[str, object],
        *,
        storage: "Source | None",
    ) -> Any:
        """Return an adapter with the tensors bound. Raises MissingExtraError, ValueError."""
        trainer_class: Any = load_entry(TRAINER_ENGINES, engine, port="trainer engine")
        rate = self.settings.link_mbps
        trainer = trainer_class(
            clock=self._clock,
            link=LOCAL if rate is None else Link(bits_per_s=rate * 1e6),
            storage=storage,
            **options,
        )
        trainer.bind_tensors(tensors)
        return trainer

    def rollouts(self) -> "RolloutClient":
        """Return a client of the run's rollout engines; closed with the connection."""
        client = connect_rollouts(
            self._control,
            model_name=self.settings.model_name,
            run_id=self.settings.run_id,
            max_staleness=self.settings.max_staleness,
            data_token=self._credentials.data_token,
            routes=self.settings.data.routes,
        )
        self._parts.callback(client.close)
        return client

    def notify(self, name: str, fields: Mapping[str, object]) -> None:
        """Tell the run of an event, see telemetry/events.py; a lost one is logged, no more."""
        event = Event(
            worker_id=self.worker_id,
            name=name,
            at_unix_ms=int(self._clock.time() * 1000),
            fields=dict(fields),
        )
        try:
            self._control.record_event(event)
        except ControlError as exc:
            log.warning("event %s was not recorded: %s", name, exc)


def _engine_of(tensors: object, *, is_shared: bool) -> str:
    """Return the trainer adapter for these tensors, as far as they tell."""
    if hasattr(tensors, "get_base_model"):
        return "peft"
    return "sharded" if is_shared else "torch"


def _config_of(tensors: object) -> Mapping[str, bytes]:
    """Return what a checkpoint needs beside its weights, as far as the model tells it."""
    found: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        render = getattr(getattr(tensors, name, None), "to_json_string", None)
        if render is not None:
            found[f"{name}.json"] = render().encode()
    return found


@contextmanager
def join_run(settings: RunSettings | None = None) -> Iterator[TrainerConnection]:
    """Connect this trainer process to its run, as the environment names it.

    Raises:
        PreflightError: not part of a run, or no credentials.
        UsageError: a variable or address is malformed.
    """
    settings = settings or run_settings(system.environ())
    credentials = load_credentials()
    with ExitStack() as parts:
        control = connect_control(settings.control, token=credentials.control_token)
        parts.callback(control.close)
        yield TrainerConnection(settings, control=control, credentials=credentials, parts=parts)


def connect_rollouts(
    control: ControlPlane,
    *,
    model_name: str,
    run_id: str,
    max_staleness: int,
    data_token: str,
    routes: Path | None = None,
) -> "RolloutClient":
    """Return a client of the run's rollout engines, as the control service knows them.

    Args:
        control: of the caller, who closes it after the client.
        model_name: what the engines serve.
        run_id: whose versions count.
        max_staleness: how many sequences behind the newest an engine may be.
        data_token: what the engines want to see.
        routes: a file of shorter ways to them, see transports/routes.py.
    """
    from paceline.refit.rollouts import FleetWatch, RolloutClient, RolloutConfig

    fleet = FleetWatch(control, model_name=model_name, run_id=run_id)
    if isinstance(control, SupportsVersionWatch):
        fleet.start(control)
    return RolloutClient(
        RolloutConfig(
            max_staleness=max_staleness,
            token=data_token,
            model_name=model_name,
            routes=Routes(routes),
        ),
        fleet=fleet,
        clock=system.system_async_clock(),
        chance=system.chance,
        on_close=fleet.close,
    )
