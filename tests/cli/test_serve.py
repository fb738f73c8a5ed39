"""``paceline serve`` as it meets wrong options."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli.serve import serve
from paceline.core.errors import PreflightError, UsageError

ENVIRON = {
    "PACELINE_CONTROL": "127.0.0.1:1",
    "PACELINE_CREDENTIALS": "/nowhere/credentials.json",
    "PACELINE_MODEL": "m",
    "PACELINE_RUN_ID": "r",
}


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Give the test runner its own handlers back."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_help_names_the_environment() -> None:
    """Help works without an environment and without the model libraries."""
    result = CliRunner().invoke(serve, ["--help"])
    assert result.exit_code == 0
    assert "SIGTERM" in result.output


@pytest.mark.parametrize("missing", ENVIRON)
def test_missing_setting(missing: str) -> None:
    """What neither option nor environment says is a usage error that names the option."""
    environ = {name: value for name, value in ENVIRON.items() if name != missing}
    result = CliRunner(env={missing: None, **environ}).invoke(serve, ["--model", "x"])
    assert result.exit_code == 2
    assert "Missing option" in result.output


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ([], PreflightError, "/nowhere/credentials.json"),
        (["--threads", "0"], UsageError, "threads"),
        (["--quantised", "fp8-block"], UsageError, "GLOB=SCHEME"),
        (["--lora", "--draft-model", "x"], UsageError, "leave one out"),
    ],
)
def test_wrong_setting(
    tmp_path: Path, options: list[str], error: type[Exception], match: str
) -> None:
    """What cannot be used is one of our errors, for the command line to show."""
    with pytest.raises(error, match=match):
        CliRunner(env=ENVIRON).invoke(
            serve, ["--model", str(tmp_path), *options], catch_exceptions=False
        )
