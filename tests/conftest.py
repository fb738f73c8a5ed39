"""Hypothesis profiles, and the rule that continuous integration skips nothing for a lack."""

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from paceline.system import environ

IN_CI = environ().get("CI") == "true"

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.load_profile(environ().get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip whose reason starts with ``needs`` into a failure where CI is true."""
    report = yield
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if IN_CI and report.skipped and reason.removeprefix("Skipped: ").startswith("needs"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason} (CI installs what tests need)"
    return report
