"""Job files: what comes out of right ones, and what is said about wrong ones."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.rental.budget import Budget
from paceline.runs.document import BYTES_MAX
from paceline.runs.model import JobSpec, NotifySpec, RestartMode, RoleKind
from paceline.runs.sections import Surroundings, duration_s
from paceline.runs.spec import SpecError, load_job, parse_job

AROUND = Surroundings(
    base=Path("/job"), backends=("local", "vast"), is_dir=lambda path: path.name != "missing"
)
GOOD = """\
name: arithmetic-grpo
budget: {soft_usd: 4}
refit: {model: tiny, transports: http, max_staleness: 1}
roles:
  trainer: {backend: [vast, local], gpu: h100-1x, workdir: ., run: python train.py, env: {SEED: 3}}
  rollout: {backend: local, gpu: cpu-1x, count: 2, run: paceline serve, boot_timeout: 10m}
artifacts: {pull: [checkpoints/], every: 90s, keep: 2}
"""


def parse(text: str) -> JobSpec:
    return parse_job(text.encode(), source="job.yaml", around=AROUND)


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert all(problem.line >= 1 for problem in caught.value.problems)
    return str(caught.value).splitlines()


def test_a_whole_job_is_read() -> None:
    """Every section comes out typed, with its defaults."""
    job = parse(GOOD)
    trainer, rollout = job.roles
    assert (trainer.kind, rollout.kind) == (RoleKind.TRAINER, RoleKind.ROLLOUT)
    assert trainer.backends == ("vast", "local")
    assert trainer.env == {"SEED": "3"}
    assert trainer.workdir == Path("/job")
    assert (trainer.restart, trainer.max_restarts) == (RestartMode.NEVER, 0)
    assert (rollout.restart, rollout.max_restarts) == (RestartMode.ON_FAILURE, 3)
    assert rollout.boot_timeout_s == 600
    assert job.budget is not None
    assert job.budget.hard_usd == 6
    assert job.refit is not None
    assert job.refit.transports == ("http",)
    assert job.artifacts.every_s == 90


def test_transports_are_checked() -> None:
    """Unknown ones, a bucket that is none, and a missing bucket are told with what is right."""
    job = parse(
        GOOD.replace("transports: http", "transports: [nixl, objectstore], bucket: s3://b/p")
    )
    assert job.refit is not None
    assert (job.refit.transports, job.refit.bucket) == (("nixl", "objectstore"), "s3://b/p")
    for text, said in (
        ("transports: rdma", "'nixl', 'http' or 'objectstore'"),
        ("transports: http, bucket: here", "expected a bucket and prefix such as s3://bucket/runs"),
        ("transports: objectstore", "objectstore needs refit.bucket"),
    ):
        assert said in "".join(problems(GOOD.replace("transports: http", text)))


def test_roles_without_a_trainer_are_tasks() -> None:
    """A job without a trainer is done when its tasks are."""
    job = parse("name: a\nroles: {x: {backend: local, gpu: cpu-1x, run: 'true'}}\n")
    assert job.roles[0].kind is RoleKind.TASK
    assert job.roles[0].restart is RestartMode.NEVER


def test_all_mistakes_are_told_at_once() -> None:
    """One mistake does not hide another, and each names its line and what would be right."""
    text = """\
name: Arith metic
budgt: 3
refit: {model: tiny, payload: XOR, max_staleness: -2}
roles:
  trainer:
    backend: [locl]
    gpu: a100-1x
    count: four
    workdir: missing
    run: ''
    env: {RATE: 1.5, PACELINE_X: a}
    gpus: 3
  rollout: {backend: local, gpu: 4090, count: 4, run: paceline serve, boot_timeout: 10x}
artifacts: {pull: [checkpoints/, ../x]}
"""
    said = problems(text)
    wanted = [
        "job.yaml:1: name: name must be",
        "job.yaml:2: budgt: unknown key; did you mean 'budget'?",
        "job.yaml:3: refit.max_staleness: ",
        "job.yaml:3: refit.payload: expected 'XOR_DELTA', 'FULL_TENSOR' or 'FULL_HF_CHECK",
        "job.yaml:6: roles.trainer.backend: unknown backend 'locl'; did you mean 'local'?",
        "job.yaml:7: roles.trainer.gpu: 'a100-1x' ",
        "job.yaml:8: roles.trainer.count: expected a whole number, got 'four'",
        "job.yaml:9: roles.trainer.workdir: no such directory: /job/missing",
        "job.yaml:10: roles.trainer.run: must not be empty",
        "job.yaml:11: roles.trainer.env.RATE: expected text; put the value in quotes",
        "job.yaml:12: roles.trainer.gpus: unknown key; did you mean 'gpu'?",
        "job.yaml:13: roles.rollout.boot_timeout: expected a duration",
        "job.yaml:13: roles.rollout.gpu: expected text, got 4090",
        "job.yaml:14: artifacts.pull: '../x' must be a path below",
    ]
    assert len(said) == len(wanted)
    for line, want in zip(said, wanted, strict=True):
        assert line.startswith(want)


ROLE = "{backend: local, gpu: cpu-1x, run: x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1: expected a mapping with keys name, roles"),
        ("- a", "1: expected a mapping"),
        ("name: a\n", "1: roles: this key is required"),
        ("name: a\nroles: {}\n", "2: roles: name at least one role"),
        ("name: a\nname: b\n", "2: key 'name' is there already, on line 1"),
        ("name: [\n", "not YAML: "),
        ("a: &x [*x]\n", "1: more than"),
        ("a: " + "[" * 3000, "nested"),
        ("? [a]\n: b\n", "1: a key must be plain text"),
        ("\x00", "not YAML: "),
        (f"name: a\nroles: {{A b: {ROLE}}}}}\n", "2: roles.A b: role name must be"),
        (
            "name: a\nroles: {x: {backend: vast, gpu: h100-1x, run: x}}\n",
            "2: roles.x.backend: 'vast' costs money and the job has no budget; add at the top",
        ),
        (
            f"name: a\nroles: {{trainer: {ROLE}, restart: always}}}}\n",
            "2: roles.trainer.restart: a trainer that is done ends the run",
        ),
        (
            f"name: a\nroles: {{trainer: {ROLE}, count: 2}}}}\n",
            "2: roles.trainer: a job has one trainer, on one machine",
        ),
        (
            f"name: a\nrefit: {{model: m}}\nroles: {{x: {ROLE}}}}}\n",
            "2: refit: needs a trainer",
        ),
        (
            f"name: a\nbudget: {{soft_usd: 3, hard_usd: 2}}\nroles: {{x: {ROLE}}}}}\n",
            "2: budget.hard_usd: must not be below soft_usd",
        ),
        (f"name: a\nbudget: {{soft_usd: .inf}}\nroles: {{x: {ROLE}}}}}\n", "2: budget.soft_usd: "),
        (
            f"name: a\nrefit: {{model: m, listen: here}}\nroles: {{trainer: {ROLE}}}}}\n",
            "2: refit.listen: expected HOST:PORT",
        ),
        (f"name: a\nroles: {{x: {ROLE}, env: {{A: true}}}}}}\n", "2: roles.x.env.A: expected text"),
    ],
)
def test_what_is_said_about_one_mistake(text: str, said: str) -> None:
    """Each kind of mistake is told with its line and what would be right."""
    assert said in "\n".join(problems(text))


def test_a_value_of_env_is_never_shown() -> None:
    """What is under env may be a secret: an error names the key alone."""
    said = "\n".join(problems(f"name: a\nroles: {{x: {ROLE}, env: {{TOKEN: [hunter2]}}}}}}\n"))
    assert "TOKEN" in said
    assert "hunter2" not in said


def test_a_file_that_is_too_large_or_not_text_is_refused() -> None:
    """Size and encoding are checked before anything is built."""
    for data in (b"#" * (BYTES_MAX + 1), b"name: \xff\n"):
        with pytest.raises(SpecError, match=r"job\.yaml:1: "):
            parse_job(data, source="job.yaml", around=AROUND)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A missing job file is a usage error that names the path."""
    with pytest.raises(UsageError, match=r"nope\.yaml: No such file"):
        load_job(tmp_path / "nope.yaml", backends=("local",))


def test_directories_count_from_the_job_file(tmp_path: Path) -> None:
    """A relative workdir is beside the job file, whoever reads it from wherever."""
    (tmp_path / "code").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nroles: {{x: {ROLE}, workdir: code}}}}\n")
    assert load_job(path, backends=("local",)).roles[0].workdir == tmp_path / "code"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), (7, 7), (0.5, 0.5)],
)
def test_durations(text: object, seconds: float) -> None:
    """A duration is a number of seconds, or a number with a unit."""
    assert duration_s(text) == seconds


WORDS = st.sampled_from(
    [
        "name",
        "roles",
        "budget",
        "refit",
        "artifacts",
        "trainer",
        "backend",
        "gpu",
        "run",
        "env",
        "count",
        "workdir",
        "pull",
        "soft_usd",
        "model",
        "local",
        "cpu-1x",
        "x",
        "kind",
        "listen",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_no_text_crashes_the_reader(data: bytes) -> None:
    """Whatever the bytes, the answer is a job or a SpecError whose problems all have a place."""
    _is_job_or_error(data)


@given(TREES)
def test_no_document_crashes_the_reader(tree: object) -> None:
    """Whatever YAML says, the answer is a job or a SpecError whose problems all have a place."""
    _is_job_or_error(yaml.safe_dump(tree).encode())


FLAT = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(WORDS, LEAVES, max_size=2)


@given(st.dictionaries(WORDS, FLAT, max_size=3), st.dictionaries(WORDS, FLAT, max_size=3))
def test_no_change_to_a_good_job_crashes_the_reader(
    top: dict[str, object], role: dict[str, object]
) -> None:
    """The same for documents that are nearly right, which get further into the checks."""
    job = yaml.safe_load(GOOD)
    job["roles"]["rollout"] |= role
    _is_job_or_error(yaml.safe_dump(job | top).encode())


def _is_job_or_error(data: bytes) -> None:
    try:
        job = parse_job(data, source="job.yaml", around=AROUND)
    except SpecError as exc:
        found = exc.problems
    else:
        assert job.roles
        assert all(role.count >= 1 and role.run.strip() for role in job.roles)
        return
    assert found
    assert all(problem.line >= 1 and problem.message for problem in found)
    assert max(problem.line for problem in found) <= len(data) + 1


@pytest.mark.parametrize(
    "text",
    [
        'name: a\nroles:\n  t: {backend: local, gpu: cpu-1x, run: "echo \\ud800"}\n',
        'name: a\nroles:\n  t: {backend: local, gpu: cpu-1x, run: x, env: {A: "\\udfff"}}\n',
        'name: a\nroles:\n  "\\ud800": {backend: local, gpu: cpu-1x, run: x}\n',
    ],
)
def test_half_a_character_is_refused_where_it_stands(text: str) -> None:
    """YAML can spell what no file and no program takes; it is not found out on a machine."""
    [said] = problems(text)
    assert said.startswith("job.yaml:3: ")
    assert "lone surrogate" in said


NIGHT = """\
name: night
budget: {soft_usd: 5, grace: 3m}
artifacts: {pull: ckpt, every: 10m, keep: 2, to: "s3://bucket/prefix"}
notify: {command: ./wake-me.sh, webhook: "https://example.com/x"}
dead_man: {after: 45m}
roles: {trainer: {backend: vast, gpu: h100-1x, run: x, restart: on-failure, max_restarts: 7}}
"""


def test_what_a_night_alone_needs() -> None:
    """Money, checkpoints, notices, the switch and the trainer's policy, each as it was written."""
    job = parse_job(NIGHT.encode(), source="job.yaml", around=AROUND)
    assert job.budget == Budget(soft_usd=5.0, hard_usd=7.5, grace_s=180.0)
    assert (job.artifacts.to, job.artifacts.keep) == ("s3://bucket/prefix", 2)
    assert job.notify == NotifySpec(command="./wake-me.sh", webhook="https://example.com/x")
    assert job.dead_man.after_s == 2700.0
    (trainer,) = job.roles
    assert (trainer.restart, trainer.max_restarts) == (RestartMode.ON_FAILURE, 7)


def test_what_is_wrong_with_a_night_is_told_at_once() -> None:
    """All new keys in one go, each with its line and what would be right."""
    text = NIGHT.replace("3m", "soon").replace("s3:", "ftp:").replace("https:", "file:")
    text = text.replace("45m", "1s").replace("command: ./wake-me.sh", "commando: x")
    said = problems(text)
    assert [line.split(" ")[0] for line in said] == [
        "job.yaml:2:",
        "job.yaml:3:",
        "job.yaml:4:",
        "job.yaml:4:",
        "job.yaml:5:",
    ]
    for part in (
        "budget.grace: ",
        "s3://, gs://",
        "did you mean 'command'",
        "begins with https://",
    ):
        assert part in "\n".join(said)
    assert "dead_man.after" in said[-1]


def test_what_no_seller_has_and_what_is_there_twice_are_told_with_all_else() -> None:
    """One mistake never hides another; a backend that names GPUs itself may have anything."""
    text = """\
name: a
budget: {soft_usd: 5, hard_usd: 2}
roles:
  trainer: {backend: vast, gpu: h900-1x, run: x, run: y}
  other: {backend: [vast, local], gpu: h900-1x, kind: task, run: x}
"""
    with pytest.raises(SpecError) as caught:
        parse_job(text.encode(), source="job.yaml", around=AROUND)
    budget, twice, gpu = str(caught.value).splitlines()
    assert budget == "job.yaml:2: budget.hard_usd: must not be below soft_usd"
    assert twice == "job.yaml:4: key 'run' is there already, on line 4"
    assert gpu.startswith("job.yaml:4: roles.trainer.gpu: 'h900' is no GPU that is known here; ")
