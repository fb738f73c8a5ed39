"""A worker that is killed at a named point of its second version."""

import sys
import threading

from paceline.refit.generators.vllm.extension import WorkerExtension
from paceline.system import environ
from paceline.testing.killed_at import die_at


class DyingExtension(WorkerExtension):
    """Mixed into vLLM's worker class in the place of ours."""

    def paceline_stage(self, version_id: str, known: list[str] | None = None) -> None:
        """Watch for the point from the version on that is no full one any more."""
        if version_id != "v0":
            profile = die_at(environ()["PACELINE_TEST_DIES_AT"])
            threading.setprofile(profile)
            sys.setprofile(profile)
        super().paceline_stage(version_id, known)
