"""Whether a machine is what was offered: what it is asked to print, and what that means. Pure.

`nvidia-smi` says what the driver sees; the CUDA driver itself is called for what that does not
show: a GPU that is listed and cannot be used. Everything is written into one file, because a
backend's commands give nothing back but a status.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.rental import netfloor
from paceline.rental.catalogue import boards_of, parse_target
from paceline.rental.model import Offer

REPORT_BYTES_MAX: Final = 65_536
SCRIPT_TIMEOUT_S: Final = 180
_NUM_GPUS_MAX = 64
_DISK_SHARE: Final = 0.6
"""Of the disk that was asked for must be free: the image takes its part of it."""
_MEMORY_SHARE: Final = 0.93
"""Of the offered memory: cards report less than is marketed."""
_CPU: Final = "cpu"

_CUDA_CALLS: Final = r"""
import ctypes, sys

def say(text):
    print("cuda=" + text)
    sys.exit(0)

try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as exc:
    say("absent: " + str(exc))

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        say("failed: %s returned %d" % (name, status))

call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for number in range(count.value):
    device, context = ctypes.c_int(), ctypes.c_void_p()
    total, memory = ctypes.c_size_t(), ctypes.c_uint64()
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    words = 1 << 22
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * words))
    call("cuMemsetD32_v2", memory, ctypes.c_uint(0x5EED0000 + number), ctypes.c_size_t(words))
    call("cuCtxSynchronize")
    last = ctypes.c_uint()
    call("cuMemcpyDtoH_v2", ctypes.byref(last), ctypes.c_uint64(memory.value + 4 * (words - 1)),
         ctypes.c_size_t(4))
    if last.value != 0x5EED0000 + number:
        say("failed: GPU %d does not give back what was written to it" % number)
    call("cuMemFree_v2", memory)
    print("cuda_memory=%d" % total.value)
say("works on %d" % count.value)
"""
"""Allocates, writes and reads on every GPU; needs Python and nothing else."""

_SCRIPT: Final = r"""
set -u
umask 077
mkdir -p {folder} || exit 70
exec 3>&1 >{folder}/report 2>/dev/null
echo 'paceline=1'
python=$(command -v python3 || command -v python || true)
{net_begin}
if command -v nvidia-smi >/dev/null; then
  timeout -k 5 60 nvidia-smi --format=csv,noheader,nounits \
    --query-gpu=index,name,memory.total,driver_version 2>&1 | head -n 100 | sed 's/^/gpu=/'
else
  echo 'smi=absent'
fi
if [ -n "$python" ]; then
  timeout -k 5 90 "$python" - <<'PACELINE_PROBE' || echo "cuda=failed: the probe ended with $?"
{calls}
PACELINE_PROBE
else
  echo 'cuda=untested'
fi
echo "disk_kb=$(df -kP . | awk 'NR == 2 {{ print $4 }}')"
{net_end}
echo 'end=1'
"""
_LINE = re.compile(r"([a-z_]{1,20})=(.{0,300})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a machine has to be."""

    num_gpus: int
    memory_mb_min: float
    """Of each GPU."""
    disk_gb_min: float
    net_mbps_min: float = 0.0
    """Zero: nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    memory_mb: float
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a machine printed about itself."""

    is_whole: bool
    """It came to the end of its script."""
    gpus: Sequence[Gpu] = ()
    complaints: Sequence[str] = ()
    """Lines of nvidia-smi that describe no GPU."""
    cuda: str = ""
    disk_kb: float | None = None
    net: netfloor.Seen = netfloor.UNSEEN
    facts: Mapping[str, str] = field(default_factory=dict)


def demand_of(
    gpu: str, offer: Offer, *, disk_gb: int, net_floor_mbps: float | None = None
) -> Demand | None:
    """Return what a machine for ``gpu`` has to be; None for one that has none to be asked about.

    ``net_floor_mbps`` None: by what the offer claims; zero: the network is not looked at.
    """
    target = parse_target(gpu)
    if target.gpu == _CPU:
        return None
    boards = boards_of(target.gpu)
    offered_mb = _MEMORY_SHARE * 1024 * offer.gpu_total_ram_gb / max(1, offer.num_gpus)
    known_mb = [_MEMORY_SHARE * 1024 * board.memory_gb for board in boards]
    return Demand(
        num_gpus=target.count,
        # what the name promises, or what was offered where that is less: boards share names
        memory_mb_min=min([offered_mb, *known_mb]) if offered_mb else min(known_mb, default=0.0),
        disk_gb_min=_DISK_SHARE * disk_gb,
        net_mbps_min=netfloor.floor_mbps(offer, net_floor_mbps),
    )


def script(
    folder: str,
    *,
    has_net: bool = False,
    net_url: str = "",
    net_timeout_s: int = netfloor.PROBE_TIMEOUT_S,
) -> str:
    """Return the command that writes the report into ``folder``, a path without odd characters.

    With ``has_net`` the network is measured beside the rest, from ``net_url`` where one is given.
    """
    return _SCRIPT.format(
        folder=folder,
        calls=_CUDA_CALLS.strip(),
        net_begin=netfloor.begin(folder, url=net_url, timeout_s=net_timeout_s) if has_net else "",
        net_end=netfloor.end(folder) if has_net else "",
    )


def parse(text: str) -> Report:
    """Return what a report says; lines that make no sense are left out. Never raises."""
    gpus: list[Gpu] = []
    complaints: list[str] = []
    facts: dict[str, str] = {}
    for line in text[:REPORT_BYTES_MAX].splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        name, value = found.groups()
        if name != "gpu":
            facts[name] = value
        elif (gpu := _gpu(value)) is not None and len(gpus) < _NUM_GPUS_MAX:
            gpus.append(gpu)
        elif value.strip():
            complaints.append(value.strip())
    return Report(
        is_whole=facts.get("paceline") == "1" and facts.get("end") == "1",
        gpus=tuple(gpus),
        complaints=tuple(complaints),
        cuda=facts.get("cuda", ""),
        disk_kb=_number(facts.get("disk_kb")),
        net=netfloor.seen(_number(facts.get("net_bytes_s")), facts.get("net", "")),
        facts=facts,
    )


def objections(report: Report, demand: Demand) -> list[str]:
    """Return why a machine is not accepted; nothing when it is what was offered."""
    if not report.is_whole:
        return ["its check did not come to an end"]
    found = [*_gpu_objections(report, demand), *_cuda_objections(report, demand)]
    free_gb = None if report.disk_kb is None else report.disk_kb * 1024 / 1e9
    if free_gb is None or free_gb < demand.disk_gb_min:
        has = "an unknown amount" if free_gb is None else f"{free_gb:.0f} GB"
        found.append(f"has {has} of disk free, {demand.disk_gb_min:.0f} GB are needed")
    slow = netfloor.objection(report.net, demand.net_mbps_min)
    return found if slow is None else [*found, slow]


def _gpu_objections(report: Report, demand: Demand) -> list[str]:
    if report.facts.get("smi") == "absent":
        return ["has no nvidia-smi, so no driver"]
    found = [f"nvidia-smi: {line}" for line in report.complaints[:3]]
    if len(report.gpus) != demand.num_gpus:
        found.append(f"has {len(report.gpus)} GPUs that answer, {demand.num_gpus} were offered")
    small = [gpu for gpu in report.gpus if gpu.memory_mb < demand.memory_mb_min]
    if small:
        gpu = small[0]
        found.append(
            f"{gpu.name} has {gpu.memory_mb:.0f} MiB, at least {demand.memory_mb_min:.0f} were "
            "offered"
        )
    return found


def _cuda_objections(report: Report, demand: Demand) -> list[str]:
    if report.cuda == "untested":  # no Python there, so nvidia-smi alone has to do
        return []
    if not report.cuda.startswith("works on "):
        return [f"CUDA {report.cuda or 'did not answer'}"]
    count = _number(report.cuda.removeprefix("works on "))
    if count != demand.num_gpus:
        return [f"CUDA {report.cuda} GPUs, {demand.num_gpus} were offered"]
    return []


def _gpu(row: str) -> Gpu | None:
    cells = [cell.strip() for cell in row.split(",")]
    memory_mb = _number(cells[2]) if len(cells) == 4 else None  # noqa: PLR2004 - as asked for
    if memory_mb is None or not cells[0].isdigit():
        return None
    return Gpu(name=cells[1], memory_mb=memory_mb, driver=cells[3])


def _number(text: str | None) -> float | None:
    if text is None or re.fullmatch(r"[0-9]{1,18}(?:\.[0-9]{1,6})?", text.strip()) is None:
        return None
    return float(text)
