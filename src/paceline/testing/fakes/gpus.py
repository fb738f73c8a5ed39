"""What stands in for a GPU driver on a machine that has none: programs and a library of its own.

`nvidia-smi` prints what it is told, and `libcuda.so.1` is a real library with the calls that a
check of the driver makes, over memory of the process. Needs a C compiler.
"""

import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.core.errors import PreflightError

_SMI = """\
#!/bin/sh
{dead}
i=0
while [ $i -lt {count} ]; do
  echo "$i, {name}, {memory_mb}, 570.86.15"
  i=$((i + 1))
done
"""
_DF = """\
#!/bin/sh
echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'
echo "/dev/fake {disk_kb} 0 {disk_kb} 0% /"
"""
_LIBCUDA = """\
typedef unsigned long size_t;
extern void *malloc(size_t);
extern void free(void *);
extern void *memcpy(void *, const void *, size_t);
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < COUNT ? 0 : 101; }
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = MEMORY_MB * 1048576UL; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(size_t)(device + 1);
  return DEAD && device == COUNT - 1 ? 719 : 0;
}
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(size_t *memory, size_t bytes) {
  *memory = (size_t)malloc(bytes);
  return *memory ? 0 : 2;
}
int cuMemFree_v2(size_t memory) { free((void *)memory); return 0; }
int cuMemsetD32_v2(size_t memory, unsigned word, size_t count) {
  for (size_t i = 0; i < count; i++) ((unsigned *)memory)[i] = word;
  return 0;
}
int cuMemcpyDtoH_v2(void *to, size_t from, size_t bytes) {
  memcpy(to, (void *)from, bytes);
  return 0;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpus:
    """What a machine's driver shows."""

    name: str
    count: int
    memory_mb: int
    disk_gb: int = 10_000
    """What `df` says is free."""
    is_dead: bool = False
    """The last GPU is listed and cannot be used."""
    is_lost: bool = False
    """nvidia-smi finds that a GPU has fallen off the bus."""


def can_fake_gpus() -> bool:
    """Return whether there is a compiler for the library."""
    return shutil.which("cc") is not None


def install_driver(folder: Path, gpus: FakeGpus) -> None:
    """Put programs and library into ``folder``, which belongs on PATH and LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    lost = "echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 6"
    name = gpus.name.replace(",", " ")
    smi = _SMI.format(
        dead=lost if gpus.is_lost else "",
        count=gpus.count,
        name=shlex.quote(name).strip("'"),
        memory_mb=gpus.memory_mb,
    )
    df = _DF.format(disk_kb=gpus.disk_gb * 10**9 // 1024)
    for program, text in (("nvidia-smi", smi), ("df", df)):
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    library = _library(gpus.count, gpus.memory_mb, is_dead=gpus.is_dead)
    (folder / "libcuda.so.1").write_bytes(library)


@cache
def _library(count: int, memory_mb: int, *, is_dead: bool) -> bytes:
    compiler = shutil.which("cc")
    if compiler is None:
        raise PreflightError("there is no C compiler on this host: apt-get install gcc")
    with tempfile.TemporaryDirectory() as name:
        source, built = Path(name) / "cuda.c", Path(name) / "libcuda.so.1"
        source.write_text(_LIBCUDA)
        facts = [f"-DCOUNT={count}", f"-DMEMORY_MB={memory_mb}", f"-DDEAD={int(is_dead)}"]
        argv = [compiler, "-shared", "-fPIC", "-O1", "-nostdlib", "-fno-builtin", *facts]
        subprocess.run([*argv, "-o", str(built), str(source)], check=True)
        return built.read_bytes()
