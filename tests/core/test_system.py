"""What the machine says of itself."""

from pathlib import Path

import pytest

from paceline.system import memory_available

MEMINFO = "MemTotal: 32 kB\nMemAvailable: 16 kB\n"
KIB = 1024


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(place: str, limit: str, used: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup{place}"
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n"}


V1 = "sys/fs/cgroup/memory"
CASES: dict[str, tuple[dict[str, str], int]] = {
    "nothing is known": ({}, 0),
    "the machine": ({"proc/meminfo": MEMINFO}, 16 * KIB),
    "no limit": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **v2("/a", "max", "9")},
        16 * KIB,
    ),
    "a group": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            **v2("/a/b", "9000", "5000"),
            "sys/fs/cgroup/a/b/memory.stat": "anon 1\ninactive_file 500\n",
        },
        4500,
    ),
    "the group above": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", **v2("/a", "8000", "7000")},
        1000,
    ),
    "inside a container": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", "8000", "9000")},
        0,
    ),
    "version 1": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/a\n3:cpu:/a\n0::/\n",
            f"{V1}/memory.limit_in_bytes": "9000\n",
            f"{V1}/memory.usage_in_bytes": "6000\n",
            f"{V1}/memory.stat": "total_inactive_file 10\n",
        },
        3010,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_available(tmp_path: Path, case: str) -> None:
    """The least of the machine's own and what each control group leaves."""
    files, expected = CASES[case]
    assert memory_available(written(tmp_path, files)) == expected
