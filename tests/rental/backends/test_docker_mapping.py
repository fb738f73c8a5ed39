"""What an engine says and is told: GPU requests, states, labels; total over what nobody knows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.backends.docker import mapping
from paceline.rental.backends.docker.config import DockerConfig, GpuRequests
from paceline.rental.backends.docker.mapping import Engine, Gpu
from paceline.rental.catalogue import parse_target
from paceline.rental.errors import NoOffersError, ProvisionError
from paceline.rental.model import OfferConstraints

ENGINE = Engine(num_cpus=4, ram_gb=16, root="/", has_runtime=True, has_cdi=False)
GPUS = [Gpu(index="0", kind="rtx4090", ram_gb=24), Gpu(index="1", kind="rtx4090", ram_gb=24)]
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
OBJECTS = st.dictionaries(st.sampled_from(["Labels", "Status", "StartedAt", "x"]), LEAVES)
JSON = LEAVES | OBJECTS | st.lists(LEAVES | OBJECTS, max_size=3)


@given(JSON)
def test_any_container_has_a_status_and_a_handle(content: object) -> None:
    """Whatever inspect prints, nothing raises."""
    for container in mapping.parse_containers(json.dumps([{"Config": content, "State": content}])):
        assert mapping.status_of(container, now_s=1.0).state == "unknown"
        assert mapping.handle_of(container).backend == "local-docker"
        assert mapping.devices_of(container) is not None


@given(st.text(max_size=50))
def test_any_text_is_some_list(text: str) -> None:
    """So for what is no JSON at all."""
    assert isinstance(mapping.parse_containers(text), list)
    assert isinstance(mapping.parse_gpus(text), list)


@given(
    st.dictionaries(st.sampled_from(["NCPU", "MemTotal", "Runtimes", "DiscoveredDevices"]), JSON)
)
def test_any_info_is_some_engine(info: dict[str, object]) -> None:
    """What is missing or odd counts as nothing."""
    assert mapping.parse_engine(info).num_cpus >= 0


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("created", "loading"),
        ("restarting", "loading"),
        ("running", "running"),
        ("paused", "stopped"),
        ("exited", "stopped"),
        ("removing", "unknown"),
        ("dead", "unknown"),
        ("hibernating", "unknown"),
    ],
)
def test_states(word: str, state: str) -> None:
    """Each of the engine's words, and one that it may yet invent."""
    container = {"State": {"Status": word, "StartedAt": "2026-01-01T00:00:00.123456789Z"}}
    status = mapping.status_of(container, now_s=1_767_225_610.0)
    assert status.state == state
    assert status.uptime_s == (10.0 if state == "running" else None)


def test_a_container_that_never_started_has_no_uptime() -> None:
    """The engine's year 1 is not a time."""
    container = {"State": {"Status": "running", "StartedAt": "0001-01-01T00:00:00Z"}}
    assert mapping.status_of(container, now_s=1.0).uptime_s is None


@pytest.mark.parametrize(
    ("name", "ram_gb", "kind"),
    [
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx6000ada"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 16, "v100"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA B200", 180, "b200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "blackwell6000"),
        ("", 0, ""),
    ],
)
def test_a_gpus_own_name_becomes_the_canonical_word(name: str, ram_gb: int, kind: str) -> None:
    """As nvidia-smi prints them."""
    assert mapping.gpu_kind(name, ram_gb=ram_gb) == kind


def test_gpus_are_read_from_csv() -> None:
    """Index, name and memory, one line each."""
    csv = "0, NVIDIA GeForce RTX 4090, 24564 MiB\n1, NVIDIA GeForce RTX 4090, 24564 MiB\n"
    assert mapping.parse_gpus(csv) == GPUS


@pytest.mark.parametrize(
    ("requests", "has_cdi", "words"),
    [
        (GpuRequests.AUTO, False, ['--gpus="device=0,1"']),
        (GpuRequests.AUTO, True, ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"]),
        (GpuRequests.RUNTIME, True, ['--gpus="device=0,1"']),
        (GpuRequests.CDI, False, ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"]),
    ],
)
def test_gpus_are_requested_by_runtime_or_cdi(
    requests: GpuRequests, has_cdi: bool, words: list[str]
) -> None:
    """By name, never all; the list keeps its commas."""
    engine = Engine(num_cpus=4, ram_gb=16, root="/", has_runtime=True, has_cdi=has_cdi)
    config = DockerConfig(gpu_requests=requests)
    assert mapping.option_words(config, engine, ["0", "1"])[2:] == words
    assert len(mapping.option_words(config, engine, [])) == 2


def test_an_engine_with_cdi_is_told_apart() -> None:
    """Newer engines list what they found."""
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]
    assert mapping.parse_engine({"DiscoveredDevices": devices}).has_cdi
    assert not mapping.parse_engine({"DiscoveredDevices": [{"Source": "cdi", "ID": "x"}]}).has_cdi
    assert mapping.parse_engine({"Runtimes": {"nvidia": {}}}).has_runtime


def test_free_gpus_are_picked() -> None:
    """What another container has is not given again."""
    target = parse_target("rtx4090-1x")
    assert mapping.pick_devices(target, GPUS, frozenset("0")) == ("1",)
    assert mapping.pick_devices(parse_target("cpu-1x"), GPUS, frozenset()) == ()
    with pytest.raises(ProvisionError, match="0 rtx4090 are free"):
        mapping.pick_devices(target, GPUS, frozenset("01"))


def test_offers_say_what_is_missing() -> None:
    """GPUs, their runtime, processors, disk, price: each has its sentence."""

    def ask(gpu: str, engine: Engine = ENGINE, **limits: float) -> str:
        c = OfferConstraints(gpu, min_disk_gb=int(limits.get("disk", 1)), max_dph=limits.get("dph"))
        try:
            return mapping.offers_of(c, engine, GPUS, free_disk_gb=50)[0].id
        except NoOffersError as exc:
            return str(exc)

    bare = Engine(num_cpus=4, ram_gb=16, root="/", has_runtime=False, has_cdi=False)
    assert ask("rtx4090-2x") == "rtx4090-2x"
    assert ask("cpu-4x") == "cpu-4x"
    assert "has 2 rtx4090" in ask("rtx4090-3x")
    assert "nvidia-container-toolkit" in ask("rtx4090-1x", bare)
    assert "has 4 CPUs" in ask("cpu-5x")
    assert "50 GB" in ask("cpu-1x", disk=51)
    assert "costs nothing" in ask("cpu-1x", dph=-1.0)
    assert "a100-40gb" in ask("a100-1x")


def test_a_container_runs_nothing_of_its_image() -> None:
    """Its first process only waits, whatever the entry point is; the label is its name."""
    words = mapping.create_words(
        image="img", label="paceline-x", target=parse_target("cpu-1x"), devices=(), words=["--w"]
    )
    assert words[0] == "create"
    assert words[words.index("--name") + 1] == "paceline-x"
    assert words[words.index("img") - 1] == "--entrypoint=sh"
    odd = mapping.create_words(
        image="img", label="not a name", target=parse_target("cpu-1x"), devices=(), words=[]
    )
    assert "--name" not in odd
    assert f"--label={mapping.LABEL}=not a name" in odd
