"""What a job file says about links and formats reaches what the trainer publishes."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from paceline.core.errors import UsageError
from paceline.refit.compose.trainer import TrainerConnection, run_settings
from paceline.refit.control.auth import Credentials
from paceline.refit.model import VersionState, WeightPayloadFormat
from paceline.refit.publisher import CanonicalPublisher
from paceline.runs.bootstrap import role_env
from paceline.runs.model import Slot
from paceline.runs.sections import Surroundings
from paceline.runs.spec import SpecError, parse_job
from paceline.system import system_clock
from paceline.testing.fakes.control_plane import FakeControlPlane

JOB = """\
name: a
refit: {{model: tiny, {more}}}
roles:
  trainer: {{backend: local, gpu: cpu-1x, run: python train.py}}
"""


def environment(more: str) -> dict[str, str]:
    """What the trainer of such a job is started with."""
    around = Surroundings(base=Path("/job"), backends=("local",), is_dir=lambda path: True)
    job = parse_job(JOB.format(more=more).encode(), source="job.yaml", around=around)
    role = job.roles[0]
    return role_env(job, role, Slot(role=role.name, index=0), run_id="r", control="127.0.0.1:1")


def connection(more: str, control: FakeControlPlane, parts: ExitStack) -> TrainerConnection:
    """What such a trainer publishes through."""
    credentials = Credentials(role="trainer", control_token="c", data_token="d")  # noqa: S106
    settings = run_settings(environment(more))
    return TrainerConnection(settings, control=control, credentials=credentials, parts=parts)


def delta_bytes(more: str) -> int:
    """How large the second version of a tensor is, whose small weights change most."""
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(300_000, generator=generator) * 0.02}
    control = FakeControlPlane(clock=system_clock())
    with ExitStack() as parts:
        publisher = connection(more, control, parts).publisher(weights, wire_dtypes={"*": "BF16"})
        with publisher:
            publisher.publish(step=0).result()
            weights["w"] += torch.randn(300_000, generator=generator) * 1e-6
            return publisher.publish(step=1).result().payload_bytes


def test_a_slow_link_in_the_job_file_makes_smaller_deltas() -> None:
    """The encoder is told, and takes the scheme that costs time; the default is a fast one."""
    fast = delta_bytes("payload: XOR_DELTA")
    assert delta_bytes("link_mbps: 20000") == fast
    assert delta_bytes("link_mbps: 2") < 0.9 * fast


def test_a_canonical_job_publishes_into_its_bucket(tmp_path: Path) -> None:
    """The format in the job file picks the publisher; versions name their place and are READY."""
    env = environment("format: canonical, transports: objectstore, bucket: 's3://b/runs'")
    env["PACELINE_BUCKET"] = f"file://{tmp_path}"
    control = FakeControlPlane(clock=system_clock())
    credentials = Credentials(role="trainer", control_token="c", data_token="d")  # noqa: S106
    weights = {"w": torch.arange(1000.0)}
    with ExitStack() as parts:
        joined = TrainerConnection(
            run_settings(env), control=control, credentials=credentials, parts=parts
        )
        with joined.publisher(weights) as publisher:
            assert isinstance(publisher, CanonicalPublisher)
            publisher.publish(step=0).result()
            weights["w"][7] = -1
            publisher.publish(step=1).result()
    full, delta = control.list_versions("tiny")
    assert (full.state, delta.state) == (VersionState.READY, VersionState.READY)
    assert full.payload_format is WeightPayloadFormat.FULL_HF_CHECKPOINT
    assert delta.base_version_id == full.uid
    assert delta.description is not None
    assert delta.description.changed_elements == 1
    for version in (full, delta):
        assert version.object_storage is not None
        index = Path(version.object_storage.uri.removeprefix("file://"))
        assert sorted(index.parent.glob("*.safetensors"))
        assert index.exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("format: canonical", "canonical is read from S3"),
        (
            "format: canonical, transports: [objectstore, http], bucket: 's3://b'",
            "canonical is read from S3",
        ),
        (
            "format: canonical, transports: objectstore, bucket: 's3://b', payload: FULL_TENSOR",
            "canonical needs payload",
        ),
        ("payload: FULL_HF_CHECKPOINT", "FULL_HF_CHECKPOINT needs objectstore"),
        ("staging: NOWHERE", "expected 'COPY_TO_HOST'"),
        ("when_leased: wait", "expected 'block', 'drop' or 'skip'"),
        ("format: slime", "expected 'paceline' or 'canonical'"),
    ],
)
def test_jobs_that_nobody_could_read_are_refused(more: str, said: str) -> None:
    """Before anything is rented."""
    with pytest.raises(SpecError, match=said):
        environment(more)


def test_canonical_needs_a_bucket_in_the_environment_too() -> None:
    """A process that is started by hand is told what is missing."""
    env = {
        "PACELINE_RUN_ID": "r",
        "PACELINE_MODEL": "m",
        "PACELINE_CONTROL": "127.0.0.1:1",
        "PACELINE_FORMAT": "canonical",
    }
    credentials = Credentials(role="trainer", control_token="c", data_token="d")  # noqa: S106
    control = FakeControlPlane(clock=system_clock())
    with ExitStack() as parts:
        joined = TrainerConnection(
            run_settings(env), control=control, credentials=credentials, parts=parts
        )
        with pytest.raises(UsageError, match="PACELINE_BUCKET"):
            joined.publisher({"w": torch.zeros(3)})


@pytest.mark.parametrize(
    ("more", "least"),
    [
        ("payload: XOR_DELTA", 3),
        ("payload: FULL_TENSOR", 2),
        ("payload: XOR_DELTA, staging: IN_PLACE", 1),
    ],
)
def test_too_few_arenas_are_refused(more: str, least: int) -> None:
    """With fewer there would be a version that never finds room, whoever waits for it."""
    control = FakeControlPlane(clock=system_clock())
    weights = {"w": torch.zeros(3)}
    with ExitStack() as parts:
        joined = connection(more, control, parts)
        joined.publisher(weights, arenas=least)
        with pytest.raises(UsageError, match=f"at least {least}"):
            joined.publisher(weights, arenas=least - 1)
