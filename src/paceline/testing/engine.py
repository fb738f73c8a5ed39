"""A Docker engine for tests, and an image for it that comes from no registry."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from paceline.core.clock import Clock
from paceline.core.errors import PreflightError
from paceline.core.waiting import wait_until
from paceline.system import environ, system_clock

IMAGE = "paceline-test:1"
"""A minimal Debian with rsync, not configured: it has programs and no users but root."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SUITE = "bookworm"
_EXTRA_PACKAGES = ("rsync", "libpopt0", "libssl3", "libxxhash0")
_LEFT_OUT = ("./debootstrap", "./var/cache/apt", "./usr/share/doc", "./usr/share/locale")
_START_TIMEOUT_S = 60.0


def lacking() -> str | None:
    """Return what this host lacks for an engine and its image, None when all is there."""
    for program, package in (("docker", "docker.io"), ("debootstrap", "debootstrap")):
        if shutil.which(program, path=_PATH) is None:
            return f"needs {program}: apt-get install {package}"
    if _answers(("docker",)):
        return None
    if shutil.which("dockerd", path=_PATH) is None:
        return "needs dockerd: apt-get install docker.io"
    return None if os.getuid() == 0 else "needs a running Docker engine, or root to start one"


@contextmanager
def engine(*, clock: Clock | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the command line of an engine that has ``IMAGE``: the one that runs, or one of our own.

    Ours has data, socket and process number of its own, no bridge and no firewall rules, and goes
    away with all its containers.
    """
    if _answers(("docker",)):
        _import_image(("docker",))
        yield ("docker",)
        return
    root = Path(tempfile.mkdtemp(prefix="paceline-engine-"))
    try:
        with _private_engine(root, clock or system_clock()) as command:
            _import_image(command)
            yield command
            _remove_containers(command)
    finally:
        for namespace in (root / "exec" / "netns").glob("*"):
            _run(["umount", str(namespace)], check=False)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _private_engine(root: Path, clock: Clock) -> Iterator[tuple[str, ...]]:
    (root / "config.json").write_text("{}")
    command = ("docker", "-H", f"unix://{root}/sock")
    argv = ["dockerd", f"--config-file={root}/config.json", f"--host=unix://{root}/sock"]
    argv += [f"--data-root={root}/data", f"--exec-root={root}/exec", f"--pidfile={root}/pid"]
    argv += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environ(), "PATH": _PATH},
        )
    try:
        wait_until(
            lambda: process.poll() is not None or _answers(command),
            what="dockerd",
            clock=clock,
            timeout_s=_START_TIMEOUT_S,
            interval_s=0.1,
        )
        if process.poll() is not None:
            said = (root / "log").read_text(errors="replace")[-800:]
            raise PreflightError(f"dockerd does not run here: {said}")
        yield command
    finally:
        process.terminate()
        process.wait()


def _answers(command: tuple[str, ...]) -> bool:
    try:
        return _run([*command, "info"], check=False).returncode == 0
    except FileNotFoundError:
        return False


def _remove_containers(command: tuple[str, ...]) -> None:
    left = _run([*command, "ps", "--all", "--quiet"]).stdout.split()
    if left:
        _run([*command, "rm", "--force", *left])


def _import_image(command: tuple[str, ...]) -> None:
    if _run([*command, "image", "inspect", IMAGE], check=False).returncode != 0:
        _run([*command, "import", str(_image_file()), IMAGE])


def _image_file() -> Path:
    """Return the image as a tar file in the user's cache, made on first use by one of us."""
    cache = platformdirs.user_cache_path("paceline") / "test-image"
    cache.mkdir(parents=True, exist_ok=True)
    image = cache / f"{_SUITE}-1.tar"
    descriptor = os.open(cache / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not image.exists():
            _make_image(image)
    finally:
        os.close(descriptor)
    return image


def _make_image(image: Path) -> None:
    """Unpack packages and run none of their scripts, which would take as long again."""
    with tempfile.TemporaryDirectory(prefix="paceline-image-") as scratch:
        root = Path(scratch) / "root"
        _run(
            [
                "debootstrap",
                "--variant=minbase",
                "--foreign",
                "--include=rsync",
                _SUITE,
                str(root),
            ]
        )
        for package in _EXTRA_PACKAGES:
            for archive in (root / "var/cache/apt/archives").glob(f"{package}_*.deb"):
                _unpack(archive, root)
        draft = image.with_suffix(".new")
        left_out = [f"--exclude={path}" for path in _LEFT_OUT]
        _run(["tar", "-C", str(root), *left_out, "-cf", str(draft), "."])
        draft.replace(image)


def _unpack(archive: Path, root: Path) -> None:
    """Unpack one package; ``dpkg-deb --extract`` would replace the link /lib by a directory."""
    content = root.parent / "package.tar"
    with content.open("wb") as file:
        argv = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        subprocess.run(argv, check=True, stdout=file)
    _run(["tar", "-C", str(root), "--keep-directory-symlink", "-xf", str(content)])


def main() -> None:
    """Make the image ahead of the tests that need it, where that is possible."""
    if lacking() is None:
        _image_file()


def _run(argv: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**environ(), "PATH": _PATH},
    )
    if check and done.returncode != 0:
        raise PreflightError(f"{' '.join(argv[:4])}: {done.stderr[-500:] or done.stdout[-500:]}")
    return done


if __name__ == "__main__":
    main()
