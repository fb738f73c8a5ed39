"""YAML -> frozen JobSpec; every mistake at once, each with file:line and what would be right.

The text becomes a document that knows its lines (``document.py``). Each section is checked by a
pydantic model of its own, and what holds between sections is checked on the sections that came
out right: so one mistake never hides another.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    ValidationError,
)

from paceline.core.errors import UsageError
from paceline.rental.budget import Budget
from paceline.rental.catalogue import SELLERS, boards_sold, parse_target
from paceline.runs import sections
from paceline.runs.document import BYTES_MAX, Document, Problem, shown
from paceline.runs.model import (
    FREE_BACKENDS,
    ArtifactSpec,
    DeadManSpec,
    JobSpec,
    NotifySpec,
    Reach,
    RefitSpec,
    RestartMode,
    RoleKind,
    RoleSpec,
)
from paceline.runs.sections import Surroundings

HARD_OVER_SOFT = 1.5
ROLLOUT_RESTARTS = 3

# Names become part of run ids and of machine labels, which providers limit.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,29}[a-z0-9])?")


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
    if tree.is_read:
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


_SectionT = TypeVar("_SectionT", bound=sections.Section)


class _Checker:
    """Checks one tree; what is wrong is appended to ``problems``."""

    def __init__(self, *, tree: Document, around: Surroundings, problems: list[Problem]) -> None:
        self._tree = tree
        self._around = around
        self._problems = problems

    def job(self) -> JobSpec | None:
        """Return the job, or None when a section is wrong."""
        top = self._section(sections.Top, (), self._tree.value) or self._what_is_there()
        self._name((), top.name, "name")
        budget = self._optional(sections.Budget, "budget", top.budget)
        refit = self._optional(sections.Refit, "refit", top.refit)
        artifacts = self._optional(sections.Artifacts, "artifacts", top.artifacts)
        notify = self._optional(sections.Notify, "notify", top.notify)
        dead_man = self._optional(sections.DeadMan, "dead_man", top.dead_man)
        found = {
            name: self._section(sections.Role, ("roles", name), value)
            for name, value in top.roles.items()
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

    def _what_is_there(self) -> sections.Top:
        """Return the sections of a file that is wrong at the top, so that they are checked too."""
        given = self._tree.value if isinstance(self._tree.value, dict) else {}
        roles, name = given.get("roles"), given.get("name")
        return sections.Top(
            name=name if isinstance(name, str) else "unnamed",
            roles=roles if isinstance(roles, dict) else {},
            **{
                key: given.get(key)
                for key in sections.Top.model_fields
                if key not in {"name", "roles"}
            },
        )

    def _check_canonical(self, refit: sections.Refit) -> None:
        if refit.transports != ["objectstore"] or not refit.bucket.startswith("s3://"):
            problem = "canonical is read from S3: transports: [objectstore], bucket: s3://..."
            self._say(("refit", "format"), problem)
        if refit.payload != "XOR_DELTA" or refit.staging != "COPY_TO_HOST":
            problem = "canonical needs payload: XOR_DELTA and staging: COPY_TO_HOST"
            self._say(("refit", "format"), problem)

    def _check_checkpoint(self, refit: sections.Refit) -> None:
        if "objectstore" not in refit.transports:
            problem = "FULL_HF_CHECKPOINT needs objectstore among refit.transports"
            self._say(("refit", "payload"), problem)

    def _check_roles(
        self, top: sections.Top, roles: Mapping[str, sections.Role], kinds: Mapping[str, RoleKind]
    ) -> None:
        if not top.roles and not self._problems:
            self._say(("roles",), "name at least one role")
        for name, role in roles.items():
            self._name(("roles", name), name, "role name")
            self._check_gpu(name, role)
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

    def _check_gpu(self, name: str, role: sections.Role) -> None:
        """Refuse what none of the role's backends sells; ones that name GPUs themselves may."""
        refusals: list[str] = []
        for backend in role.backend:
            try:
                if backend not in SELLERS or boards_sold(parse_target(role.gpu), backend):
                    return
            except UsageError as exc:
                refusals.append(str(exc))
        self._say(("roles", name, "gpu"), "; ".join(dict.fromkeys(refusals)))

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


def _explain(error: Mapping[str, Any], model: type[sections.Section]) -> str:
    """Say what would be right; values under ``env`` may be secret and are never shown."""
    kind, loc, given = error["type"], error["loc"], error.get("input")
    context = error.get("ctx") or {}
    if kind == "extra_forbidden":
        return f"unknown key; {sections.nearest(str(loc[-1]), model.model_fields)}"
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


def _keys(model: type[sections.Section]) -> str:
    return ", ".join(model.model_fields)


def _kinds(roles: Mapping[str, sections.Role]) -> dict[str, RoleKind]:
    """Say what each role is: the name ``trainer`` decides where ``kind`` is not given."""
    given = {
        name: role.kind or ("trainer" if name == "trainer" else None)
        for name, role in roles.items()
    }
    other = "rollout" if "trainer" in given.values() else "task"
    return {name: RoleKind(kind or other) for name, kind in given.items()}


def _role(name: str, role: sections.Role, kind: RoleKind) -> RoleSpec:
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
        net_floor_mbps=None if role.net_floor_mbps == "auto" else role.net_floor_mbps,
        restart=restart,
        max_restarts=restarts if role.max_restarts is None else role.max_restarts,
        reach=Reach(role.reach),
        install_paceline=role.install_paceline,
        boot_timeout_s=math.ceil(role.boot_timeout),
        setup_timeout_s=math.ceil(role.setup_timeout),
    )


def _budget(budget: sections.Budget | None) -> Budget | None:
    if budget is None:
        return None
    hard = budget.soft_usd * HARD_OVER_SOFT if budget.hard_usd is None else budget.hard_usd
    return Budget(soft_usd=budget.soft_usd, hard_usd=hard, grace_s=budget.grace)


def _refit(refit: sections.Refit) -> RefitSpec:
    fields = refit.model_dump()
    return RefitSpec(**{**fields, "transports": tuple(refit.transports)})


def _artifacts(artifacts: sections.Artifacts) -> ArtifactSpec:
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
