"""YAML -> frozen JobSpec; every mistake at once, each with file:line and what would be right.

The text becomes a document that knows its lines (``document.py``). Each section is checked by a
pydantic model of its own, and what holds between sections is checked on the sections that came
out right: so one mistake never hides another.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from paceline.core.errors import UsageError
from paceline.rental.catalogue import parse_target
from paceline.runs.document import BYTES_MAX, Document, Problem, shown
from paceline.runs.model import (
    FREE_BACKENDS,
    ArtifactSpec,
    Budget,
    DeadManSpec,
    JobSpec,
    NotifySpec,
    Reach,
    RefitSpec,
    RestartMode,
    RoleKind,
    RoleSpec,
)

HARD_OVER_SOFT = 1.5
BUCKET_SCHEMES = ("s3", "gs", "az", "file")
PORT_MAX = 65535
ROLLOUT_RESTARTS = 3
DEAD_MAN_S_MIN = 5.0
STORE_SCHEMES = ("s3://", "gs://", "az://", "file:///")

# Names become part of run ids and of machine labels, which providers limit.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,29}[a-z0-9])?")
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SpecError(UsageError):
    """A job file is wrong; all that is wrong with it is in ``problems`` and in the text."""

    def __init__(self, source: str, problems: Collection[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.path, p.message)))
        lines = [
            f"{source}:{p.line}: {p.path}: {p.message}"
            if p.path
            else f"{source}:{p.line}: {p.message}"
            for p in self.problems
        ]
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a job file is checked against."""

    base: Path
    """Relative directories count from here."""
    backends: Collection[str]
    is_dir: Callable[[Path], bool]


def load_job(path: Path, *, backends: Collection[str]) -> JobSpec:
    """Read and check the job file at ``path``.

    Raises:
        UsageError: it cannot be read.
        SpecError: it is wrong.
    """
    around = Surroundings(base=path.resolve().parent, backends=backends, is_dir=is_dir)
    return parse_job(read_text(path), source=str(path), around=around)


def read_text(path: Path) -> bytes:
    """Return what is in a job file. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as exc:
        raise UsageError(
            f"cannot read job file {path}: {exc.strerror}; give the path of a YAML job file"
        ) from exc


def parse_job(data: bytes, *, source: str, around: Surroundings) -> JobSpec:
    """Return the job that ``data`` describes. Raises SpecError, and nothing else."""
    problems: list[Problem] = []
    tree = Document.read(data, problems)
    if not problems:
        job = _Checker(tree=tree, around=around, problems=problems).job()
        if job is not None and not problems:
            return job
    raise SpecError(source, problems)


def text_of_command(role: Mapping[str, object], *, budget_usd: float | None) -> bytes:
    """Return the job file of one machine and one command."""
    job: dict[str, object] = {"name": "run", "roles": {"task": dict(role)}}
    if budget_usd is not None:
        job["budget"] = {"soft_usd": budget_usd, "hard_usd": budget_usd}
    return json.dumps(job).encode()


def duration_s(value: object) -> object:
    """Turn ``10m`` or a number of seconds into seconds; anything else raises ValueError."""
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return int(match[1]) * _UNIT_S[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("expected a duration such as 90s, 10m, 2h or 1d")


# What each section may hold. Messages for people are made in _explain; these only decide.


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


def _blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return _no_nul(value)


def _gpu_token(value: str) -> str:
    return str(parse_target(value))  # a UsageError is a ValueError


def _around(info: ValidationInfo) -> Surroundings:
    return cast(Surroundings, info.context)


def _known_backends(value: list[str], info: ValidationInfo) -> list[str]:
    known = _around(info).backends
    for name in value:
        if name not in known:
            raise ValueError(f"unknown backend {shown(name)}; {_nearest(name, known)}")
    if not value or len(set(value)) != len(value):
        raise ValueError("name at least one backend, each once")
    return value


def _existing_dir(value: str, info: ValidationInfo) -> Path:
    around = _around(info)
    path = around.base / _no_nul(value)
    if not around.is_dir(path):
        raise ValueError(f"no such directory: {path}")
    return path


def _inside(value: list[str]) -> list[str]:
    for item in value:
        path = PurePosixPath(_blank(item))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{shown(item)} must be a path below the working directory")
    return value


def _environment(value: Mapping[str, str | int]) -> dict[str, str]:
    for key in value:
        if not _ENV_KEY.fullmatch(key) or key.startswith("PACELINE_"):
            raise ValueError(f"{shown(key)} cannot be set: not a variable name, or ours")
    return {key: _no_nul(str(item)) for key, item in value.items()}


def _env_item(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("expected text; put the value in quotes")  # noqa: TRY004 - pydantic's way
    return str(value)


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > PORT_MAX:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:0, got {shown(value)}")
    return value


def _bucket_url(value: str) -> str:
    scheme, found, rest = value.partition("://")
    if value and (not found or scheme not in BUCKET_SCHEMES or not rest.strip("/")):
        raise ValueError(
            f"expected a bucket and prefix such as s3://bucket/runs, got {shown(value)}"
        )
    return value


def _web_address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("expected an address that begins with https:// or http://")
    return value


def _store_address(value: str) -> str:
    if not value.startswith(STORE_SCHEMES):
        raise ValueError(f"expected the URL of an object store: {', '.join(STORE_SCHEMES)}...")
    return value


_Text = Annotated[str, AfterValidator(_blank)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Duration = Annotated[float, BeforeValidator(duration_s), Field(gt=0, le=30 * 86400.0)]
_Count = Annotated[int, Field(ge=1, le=256)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Top(_Section):
    name: str
    roles: dict[str, Any]
    budget: Any = None
    refit: Any = None
    artifacts: Any = None
    notify: Any = None
    dead_man: Any = None


class _Budget(_Section):
    soft_usd: _Positive
    hard_usd: _Positive | None = None
    grace: _Duration = 120.0


class _Notify(_Section):
    command: _Text | None = None
    webhook: Annotated[_Text, AfterValidator(_web_address)] | None = None


class _DeadMan(_Section):
    after: Annotated[_Duration, Field(ge=DEAD_MAN_S_MIN)] = 7200.0


class _Refit(_Section):
    model: _Text
    payload: Literal["XOR_DELTA", "FULL_TENSOR", "FULL_HF_CHECKPOINT"] = "XOR_DELTA"
    format: Literal["paceline", "canonical"] = "paceline"
    staging: Literal["COPY_TO_HOST", "COPY_TO_DEVICE", "IN_PLACE", "WRITE_TO_STORAGE"] = (
        "COPY_TO_HOST"
    )
    when_leased: Literal["block", "drop", "skip"] = "block"
    when_in_place: Literal["wait", "copy"] = "wait"
    when_unproven: Literal["anchor", "new-run", "refuse"] = "anchor"
    transports: Annotated[
        list[Literal["nixl", "http", "objectstore"]], BeforeValidator(_listed), Field(min_length=1)
    ] = ["http"]
    bucket: Annotated[str, AfterValidator(_bucket_url)] = ""
    max_staleness: Annotated[int, Field(ge=0, le=1_000_000)] = 2
    link_mbps: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    anchor_every: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    listen: Annotated[str, AfterValidator(_listen)] = "127.0.0.1:0"


class _Role(_Section):
    backend: Annotated[list[str], BeforeValidator(_listed), AfterValidator(_known_backends)]
    gpu: Annotated[str, AfterValidator(_gpu_token)]
    run: _Text
    kind: Literal["trainer", "rollout", "task"] | None = None
    setup: _Text | None = None
    workdir: Annotated[str, AfterValidator(_existing_dir)] | None = None
    exclude: Annotated[list[_Text], BeforeValidator(_listed)] = []
    env: Annotated[
        dict[str, Annotated[str, BeforeValidator(_env_item)]], AfterValidator(_environment)
    ] = {}
    count: _Count = 1
    disk_gb: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    spot: bool = False
    image: str = ""
    max_dph: _Positive | None = None
    min_reliability: Annotated[float, Field(ge=0, le=1)] = 0.97
    min_inet_mbps: Annotated[int, Field(ge=0, le=1_000_000)] = 500
    restart: Literal["never", "on-failure", "always"] | None = None
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = None
    reach: Literal["auto", "direct", "tunnel", "objectstore"] = "auto"
    install_paceline: bool = True
    boot_timeout: _Duration = 1200.0
    setup_timeout: _Duration = 1800.0


class _Artifacts(_Section):
    pull: Annotated[list[str], BeforeValidator(_listed), AfterValidator(_inside)] = []
    every: _Duration | None = None
    keep: _Count = 4
    to: Annotated[_Text, AfterValidator(_store_address)] | None = None


_SectionT = TypeVar("_SectionT", bound=_Section)


class _Checker:
    """Checks one tree; what is wrong is appended to ``problems``."""

    def __init__(self, *, tree: Document, around: Surroundings, problems: list[Problem]) -> None:
        self._tree = tree
        self._around = around
        self._problems = problems

    def job(self) -> JobSpec | None:
        """Return the job, or None when a section is wrong."""
        top = self._section(_Top, (), self._tree.value) or self._what_is_there()
        self._name((), top.name, "name")
        budget = self._optional(_Budget, "budget", top.budget)
        refit = self._optional(_Refit, "refit", top.refit)
        artifacts = self._optional(_Artifacts, "artifacts", top.artifacts)
        notify = self._optional(_Notify, "notify", top.notify)
        dead_man = self._optional(_DeadMan, "dead_man", top.dead_man)
        found = {
            name: self._section(_Role, ("roles", name), value) for name, value in top.roles.items()
        }
        roles = {name: role for name, role in found.items() if role is not None}
        kinds = _kinds(roles)
        self._check_roles(top, roles, kinds)
        if budget and budget.hard_usd is not None and budget.hard_usd < budget.soft_usd:
            self._say(("budget", "hard_usd"), "must not be below soft_usd")
        if refit and "objectstore" in refit.transports and not refit.bucket:
            problem = "objectstore needs refit.bucket, such as s3://bucket/runs"
            self._say(("refit", "transports"), problem)
        if refit and refit.format == "canonical":
            self._check_canonical(refit)
        elif refit and refit.payload == "FULL_HF_CHECKPOINT":
            self._check_checkpoint(refit)
        if self._problems:
            return None
        return JobSpec(
            name=top.name,
            roles=tuple(_role(name, role, kinds[name]) for name, role in roles.items()),
            budget=_budget(budget),
            refit=None if refit is None else _refit(refit),
            artifacts=ArtifactSpec() if artifacts is None else _artifacts(artifacts),
            notify=NotifySpec(**notify.model_dump()) if notify else NotifySpec(),
            dead_man=DeadManSpec(after_s=dead_man.after) if dead_man else DeadManSpec(),
        )

    def _what_is_there(self) -> _Top:
        """Return the sections of a file that is wrong at the top, so that they are checked too."""
        given = self._tree.value if isinstance(self._tree.value, dict) else {}
        roles, name = given.get("roles"), given.get("name")
        return _Top(
            name=name if isinstance(name, str) else "unnamed",
            roles=roles if isinstance(roles, dict) else {},
            **{key: given.get(key) for key in _Top.model_fields if key not in {"name", "roles"}},
        )

    def _check_canonical(self, refit: _Refit) -> None:
        if refit.transports != ["objectstore"] or not refit.bucket.startswith("s3://"):
            problem = "canonical is read from S3: transports: [objectstore], bucket: s3://..."
            self._say(("refit", "format"), problem)
        if refit.payload != "XOR_DELTA" or refit.staging != "COPY_TO_HOST":
            problem = "canonical needs payload: XOR_DELTA and staging: COPY_TO_HOST"
            self._say(("refit", "format"), problem)

    def _check_checkpoint(self, refit: _Refit) -> None:
        if "objectstore" not in refit.transports:
            problem = "FULL_HF_CHECKPOINT needs objectstore among refit.transports"
            self._say(("refit", "payload"), problem)

    def _check_roles(
        self, top: _Top, roles: Mapping[str, _Role], kinds: Mapping[str, RoleKind]
    ) -> None:
        if not top.roles and not self._problems:
            self._say(("roles",), "name at least one role")
        for name, role in roles.items():
            self._name(("roles", name), name, "role name")
            paid = [backend for backend in role.backend if backend not in FREE_BACKENDS]
            if paid and top.budget is None:
                self._say(
                    ("roles", name, "backend"),
                    f"{paid[0]!r} costs money and the job has no budget; "
                    "add at the top: budget: {soft_usd: 5, hard_usd: 8}, or to the command: "
                    "--budget-usd 8",
                )
            if kinds[name] is RoleKind.TRAINER and role.restart == "always":
                self._say(
                    ("roles", name, "restart"),
                    "a trainer that is done ends the run; say on-failure or never",
                )
        trainers = [name for name, kind in kinds.items() if kind is RoleKind.TRAINER]
        machines = sum(roles[name].count for name in trainers)
        if machines > 1:
            self._say(("roles", trainers[-1]), "a job has one trainer, on one machine")
        if top.refit is not None and not trainers and len(roles) == len(top.roles):
            self._say(
                ("refit",), "needs a trainer: call one role trainer, or give it kind: trainer"
            )

    def _optional(self, model: type[_SectionT], key: str, value: object) -> _SectionT | None:
        return None if value is None else self._section(model, (key,), value)

    def _section(
        self, model: type[_SectionT], path: tuple[str, ...], value: object
    ) -> _SectionT | None:
        if not isinstance(value, dict):
            self._say(path, f"expected a mapping with keys {_keys(model)}, got {shown(value)}")
            return None
        try:
            return model.model_validate(value, context=self._around)
        except ValidationError as exc:
            for error in exc.errors(include_url=False):
                at = (*path, *(str(part) for part in error["loc"]))
                self._say(at, _explain(error, model))
            return None

    def _name(self, path: tuple[str, ...], value: str, what: str) -> None:
        if not _NAME.fullmatch(value):
            at = path or ("name",)
            self._say(at, f"{what} must be 1 to 31 of a-z, 0-9 and inner -, got {shown(value)}")

    def _say(self, path: tuple[str, ...], message: str) -> None:
        line = self._tree.line(path)
        self._problems.append(Problem(line=line, path=".".join(path), message=message))


def _explain(error: Mapping[str, Any], model: type[_Section]) -> str:
    """Say what would be right; values under ``env`` may be secret and are never shown."""
    kind, loc, given = error["type"], error["loc"], error.get("input")
    context = error.get("ctx") or {}
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(str(loc[-1]), model.model_fields)}"
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return str(context["error"])
    expected = {
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping",
        "literal_error": str(context.get("expected")),
    }.get(kind)
    wanted = f"expected {expected}" if expected else str(error["msg"])
    return wanted if "env" in loc else f"{wanted}, got {shown(given)}"


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    listed = ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? known: {listed}" if near else f"known: {listed}"


def _keys(model: type[_Section]) -> str:
    return ", ".join(model.model_fields)


def _kinds(roles: Mapping[str, _Role]) -> dict[str, RoleKind]:
    """Say what each role is: the name ``trainer`` decides where ``kind`` is not given."""
    given = {
        name: role.kind or ("trainer" if name == "trainer" else None)
        for name, role in roles.items()
    }
    other = "rollout" if "trainer" in given.values() else "task"
    return {name: RoleKind(kind or other) for name, kind in given.items()}


def _role(name: str, role: _Role, kind: RoleKind) -> RoleSpec:
    usual = RestartMode.ON_FAILURE if kind is RoleKind.ROLLOUT else RestartMode.NEVER
    restart = usual if role.restart is None else RestartMode(role.restart)
    restarts = 0 if restart is RestartMode.NEVER else ROLLOUT_RESTARTS
    workdir: Any = role.workdir
    return RoleSpec(
        name=name,
        kind=kind,
        backends=tuple(role.backend),
        gpu=role.gpu,
        run=role.run,
        setup=role.setup,
        workdir=workdir,
        exclude=tuple(role.exclude),
        env=dict(role.env),
        count=role.count,
        disk_gb=role.disk_gb,
        spot=role.spot,
        image=role.image,
        max_dph=role.max_dph,
        min_reliability=role.min_reliability,
        min_inet_mbps=role.min_inet_mbps,
        restart=restart,
        max_restarts=restarts if role.max_restarts is None else role.max_restarts,
        reach=Reach(role.reach),
        install_paceline=role.install_paceline,
        boot_timeout_s=math.ceil(role.boot_timeout),
        setup_timeout_s=math.ceil(role.setup_timeout),
    )


def _budget(budget: _Budget | None) -> Budget | None:
    if budget is None:
        return None
    hard = budget.soft_usd * HARD_OVER_SOFT if budget.hard_usd is None else budget.hard_usd
    return Budget(soft_usd=budget.soft_usd, hard_usd=hard, grace_s=budget.grace)


def _refit(refit: _Refit) -> RefitSpec:
    fields = refit.model_dump()
    return RefitSpec(**{**fields, "transports": tuple(refit.transports)})


def _artifacts(artifacts: _Artifacts) -> ArtifactSpec:
    return ArtifactSpec(
        pull=tuple(artifacts.pull),
        every_s=artifacts.every,
        keep=artifacts.keep,
        to=artifacts.to,
    )


def is_dir(path: Path) -> bool:
    """Return whether there is such a directory; a name that cannot be one is none."""
    try:
        return path.is_dir()
    except OSError:  # a name that no file system takes
        return False
