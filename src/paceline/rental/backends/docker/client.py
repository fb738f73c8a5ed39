"""The engine's own command line, one method per call that we make."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from paceline.core.errors import PreflightError
from paceline.rental.backends.docker import mapping
from paceline.rental.errors import BackendError, InstanceNotFoundError, ProvisionError

_TIMEOUT_S = 60.0
_PULL_TIMEOUT_S = 3600.0
_SAID_CHARS_MAX = 400
_NO_ENGINE = ("Cannot connect to the Docker daemon", "error during connect", "permission denied")
_NO_CONTAINER = "No such container"
_IN_PROGRESS = "is already in progress"


class DockerClient:
    """Calls one engine; holds no connection."""

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str]) -> None:
        self._command = tuple(command)
        self._environ = dict(environ)

    def info(self) -> mapping.Engine:
        """Return what the engine says of itself. Raises BackendError where there is none."""
        text = self._must(["info", "--format={{json .}}"])
        try:
            found = json.loads(text)
        except ValueError as exc:
            raise BackendError(f"local-docker: docker info answered {text[:80]!r}") from exc
        if not isinstance(found, Mapping):
            raise BackendError(f"local-docker: docker info answered {text[:80]!r}")
        return mapping.parse_engine(found)

    def gpus(self) -> list[mapping.Gpu]:
        """Return the GPUs of this computer, on which the engine is supposed to run."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return []
        query = ["--query-gpu=index,name,memory.total", "--format=csv,noheader"]
        return mapping.parse_gpus(self._run([program, *query], timeout_s=_TIMEOUT_S).stdout)

    def context(self) -> str:
        """Return which engine is meant, in words."""
        host = self._environ.get("DOCKER_HOST")
        return f"DOCKER_HOST {host}" if host else "the docker command's own context"

    def ensure_image(self, image: str) -> None:
        """Pull the image unless the engine has it. Raises ProvisionError."""
        if self._docker(["image", "inspect", "--format={{.Id}}", image]).returncode == 0:
            return
        done = self._docker(["pull", "--quiet", image], timeout_s=_PULL_TIMEOUT_S)
        if done.returncode != 0:
            raise ProvisionError(
                f"local-docker: image {image} is not there and cannot be pulled: "
                f"{_last(done.stderr)}; check its name, or build or load it"
            )

    def create(self, words: Sequence[str]) -> str:
        """Create a container and return its id; it does not run yet. Raises ProvisionError."""
        done = self._docker(words)
        if done.returncode != 0:
            raise ProvisionError(f"local-docker: no container was created: {_last(done.stderr)}")
        return done.stdout.strip()

    def start(self, instance_id: str) -> None:
        """Start a container; fine when it runs. Raises BackendError, InstanceNotFoundError."""
        self._on(instance_id, ["start", instance_id])

    def stop(self, instance_id: str) -> None:
        """Stop a container; fine when it does not run."""
        self._on(instance_id, ["stop", "--time=10", instance_id])

    def logs(self, instance_id: str, *, num_lines: int) -> str:
        """Return the last lines that its first process printed."""
        done = self._docker(["logs", f"--tail={num_lines}", instance_id])
        if _NO_CONTAINER in done.stderr:
            raise _not_found(instance_id)
        if done.returncode != 0:
            raise self._error(["logs"], done.stderr)
        return done.stdout + done.stderr

    def inspect(self, instance_id: str) -> Mapping[str, object] | None:
        """Return what the engine knows of a container, None if there is none."""
        done = self._docker(["container", "inspect", instance_id])
        if done.returncode != 0 and _NO_CONTAINER in done.stderr:
            return None
        if done.returncode != 0:
            raise self._error(["container", "inspect"], done.stderr)
        return next(iter(mapping.parse_containers(done.stdout)), None)

    def ours(self) -> list[Mapping[str, object]]:
        """Return every container with our label, whatever it is doing."""
        listed = ["ps", "--all", "--quiet", "--no-trunc", f"--filter=label={mapping.LABEL}"]
        ids = self._must(listed).split()
        if not ids:
            return []
        # One that goes away in between is an error of inspect's, beside the others' answers.
        return mapping.parse_containers(self._docker(["container", "inspect", *ids]).stdout)

    def remove(self, instance_id: str) -> bool:
        """Kill and remove a container; return False if there was none. It may take a moment."""
        done = self._docker(["rm", "--force", "--volumes", instance_id])
        if done.returncode == 0 or _IN_PROGRESS in done.stderr:
            return _NO_CONTAINER not in done.stderr
        if _NO_CONTAINER in done.stderr:
            return False
        raise self._error(["rm"], done.stderr)

    def _on(self, instance_id: str, words: Sequence[str]) -> str:
        done = self._docker(words)
        if _NO_CONTAINER in done.stderr:
            raise _not_found(instance_id)
        if done.returncode != 0:
            raise self._error(words[:1], done.stderr)
        return done.stdout

    def _must(self, words: Sequence[str]) -> str:
        done = self._docker(words)
        if done.returncode != 0:
            raise self._error(words[:1], done.stderr)
        return done.stdout

    def _docker(
        self, words: Sequence[str], *, timeout_s: float = _TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return self._run([*self._command, *words], timeout_s=timeout_s)

    def _run(self, argv: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=timeout_s,
                env=self._environ,
            )
        except FileNotFoundError as exc:
            raise PreflightError(
                f"there is no {argv[0]} on this computer; install docker's command line"
            ) from exc
        except subprocess.TimeoutExpired as exc:
            raise BackendError(
                f"local-docker: {argv[0]} did not answer for {timeout_s:g} s; is the engine well?"
            ) from exc

    def _error(self, words: Sequence[str], said: str) -> BackendError:
        if any(sign in said for sign in _NO_ENGINE):
            return BackendError(
                f"local-docker: no engine answers by {self.context()}: {_last(said)}; start "
                "Docker, or name another engine with DOCKER_HOST or docker context use"
            )
        return BackendError(f"local-docker: docker {' '.join(words)}: {_last(said)}")


def _not_found(instance_id: str) -> InstanceNotFoundError:
    return InstanceNotFoundError(
        f"local-docker machine {instance_id[:12]} does not exist any more; see `paceline ls`"
    )


def _last(said: str) -> str:
    return " ".join(said.split())[-_SAID_CHARS_MAX:] or "no reason was given"
