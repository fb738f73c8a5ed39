"""The running Paceline as a wheel, for machines: the same code there as here, whatever is released.

A wheel is an archive with a list of what is in it. It is made from the files that this process
runs and from what the installation says of them, so a source tree needs no build tools for it.
"""

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import paceline
from paceline.core.errors import PreflightError

WHEEL_DIR = "wheel"
"""In a run's own directory."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_KEPT = ("METADATA", "entry_points.txt")
_LEFT_OUT = frozenset({"__pycache__"})


def build_wheel(directory: Path) -> Path:
    """Make the wheel below ``directory`` and return it; one that is there is taken.

    Its name carries a digest of its content, so that another content is another file.

    Raises PreflightError: it cannot be written, or this Paceline is not installed.
    """
    files = dict(_files())
    version = f"{paceline.__version__}+{_digest(files)[:12]}"
    path = directory / f"paceline-{version}-py3-none-any.whl"
    if not path.exists():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(path.name + ".new")
            _write(scratch, files, info=f"paceline-{version}.dist-info", version=version)
            scratch.replace(path)
        except OSError as exc:
            raise PreflightError(f"cannot write {path}: {exc.strerror}; free the disk") from exc
    return path


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield the package's files by name, and what its installation says."""
    root = Path(paceline.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and not _LEFT_OUT & set(path.parts):
            yield f"paceline/{path.relative_to(root).as_posix()}", path.read_bytes()
    try:
        found = metadata.distribution("paceline")
    except metadata.PackageNotFoundError as exc:
        raise PreflightError(
            "this paceline is not installed, so what it depends on is not known; pip install it"
        ) from exc
    for name in _KEPT:
        yield name, (found.read_text(name) or "").encode()


def _digest(files: dict[str, bytes]) -> str:
    sum_ = hashlib.sha256()
    for name in sorted(files):
        sum_.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return sum_.hexdigest()


def _write(path: Path, files: dict[str, bytes], *, info: str, version: str) -> None:
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, "WHEEL": _WHEEL}.items():
            there = name if name.startswith("paceline/") else f"{info}/{name}"
            text = _with_version(content, version) if name == "METADATA" else content
            archive.writestr(_entry(there), text)
            rows.append(f"{there},sha256={_row_digest(text)},{len(text)}")
        record = f"{info}/RECORD"
        archive.writestr(_entry(record), "\n".join([*rows, f"{record},,", ""]))


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _row_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _with_version(text: bytes, version: str) -> bytes:
    """Say the version of the wheel's name, as installers want it."""
    head, _, body = text.decode().partition("\n\n")
    lines = [
        f"Version: {version}" if line.startswith("Version:") else line for line in head.split("\n")
    ]
    return ("\n".join(lines) + "\n\n" + body).encode()


_WHEEL = b"Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
