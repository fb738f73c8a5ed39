"""Write ``*_pb2.py`` and ``*_pb2.pyi`` beside the .proto files; ``--check`` only compares.

Needs exactly the grpcio-tools below: generated code refuses a protobuf runtime older than its
compiler, so it is the oldest release that our dependencies admit. No ``*_pb2_grpc.py`` is
written: services and clients are built from the descriptors (see rpc.py), which is typed, and
free of the check that ties such files to a grpcio release.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.errors import PreflightError

TOOLS_VERSION = "1.71.2"
PACKAGE_DIR = "paceline/refit/wire"
PROTO_NAMES = ("refit", "paceline_refit_v1", "health")

_OWN_POOL = {
    "from google.protobuf import descriptor_pool as _descriptor_pool\n": (
        "from paceline.refit.wire import pool as _pool\n"
    ),
    "_descriptor_pool.Default().AddSerializedFile(": "_pool.POOL.AddSerializedFile(",
}


def installed_tools() -> str | None:
    """Return the version of grpcio-tools here, or None."""
    try:
        return version("grpcio-tools")
    except PackageNotFoundError:
        return None


def generate(source_root: Path, *, target_root: Path) -> None:
    """Compile the .proto files under ``source_root`` into the same folder of ``target_root``.

    Raises:
        PreflightError: grpcio-tools is absent or another release, or protoc refused.
    """
    if installed_tools() != TOOLS_VERSION:
        raise PreflightError(
            f"generating needs grpcio-tools {TOOLS_VERSION}, found {installed_tools()}; "
            f"install it with: pip install grpcio-tools=={TOOLS_VERSION}"
        )
    from grpc_tools import protoc

    files = [str(source_root / PACKAGE_DIR / f"{name}.proto") for name in PROTO_NAMES]
    outs = [f"--python_out={target_root}", f"--pyi_out={target_root}"]
    code = protoc.main(["protoc", f"--proto_path={source_root}", *outs, *files])
    if code != 0:
        raise PreflightError(f"protoc refused {', '.join(files)} with status {code}; see above")
    for name in PROTO_NAMES:
        path = target_root / PACKAGE_DIR / f"{name}_pb2.py"
        path.write_text(use_own_pool(path.read_text(encoding="utf8")), encoding="utf8")


def use_own_pool(text: str) -> str:
    """Return generated ``text`` with its descriptors in our pool instead of the default one."""
    for old, new in _OWN_POOL.items():
        if text.count(old) != 1:
            raise PreflightError(f"generated code has no single {old!r}: protoc changed its output")
        text = text.replace(old, new)
    return text


def stale_files(source_root: Path) -> tuple[str, ...]:
    """Return the generated files that are not what their .proto gives; writes nothing there."""
    with TemporaryDirectory() as folder:
        fresh_root = Path(folder)
        generate(source_root, target_root=fresh_root)
        names = [f"{name}_pb2{end}" for name in PROTO_NAMES for end in (".py", ".pyi")]
        return tuple(
            name
            for name in names
            if _text(source_root / PACKAGE_DIR / name) != _text(fresh_root / PACKAGE_DIR / name)
        )


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf8") if path.exists() else None


def main(arguments: Sequence[str]) -> int:
    """Generate or, with ``--check``, compare; return the exit status."""
    source_root = Path(__file__).resolve().parents[3]
    if "--check" not in arguments:
        generate(source_root, target_root=source_root)
        return 0
    stale = stale_files(source_root)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run: make proto\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
