"""A trainer process finds its run in the environment, or is told what is missing."""

import pytest

from paceline.core.errors import PreflightError, UsageError
from paceline.refit.compose import run_settings
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat

NEEDED = {"PACELINE_RUN_ID": "r", "PACELINE_MODEL": "m", "PACELINE_CONTROL": "127.0.0.1:1"}


def test_needed_variables_are_enough() -> None:
    """Everything else has a default; an empty variable counts as unset."""
    settings = run_settings({**NEEDED, "PACELINE_ROLE": ""})
    assert (settings.run_id, settings.model_name, settings.role) == ("r", "m", "trainer")
    assert settings.payload_format is WeightPayloadFormat.XOR_DELTA


def test_every_variable_is_read() -> None:
    """What the run says is what the process does."""
    settings = run_settings(
        {
            **NEEDED,
            "PACELINE_PAYLOAD": "FULL_TENSOR",
            "PACELINE_STAGING": "IN_PLACE",
            "PACELINE_ANCHOR_EVERY": "3",
            "PACELINE_MAX_STALENESS": "0",
            "PACELINE_INDEX": "2",
            "PACELINE_LINK_MBPS": "87.5",
            "PACELINE_WHEN_LEASED": "skip",
            "PACELINE_WHEN_IN_PLACE": "copy",
            "PACELINE_WHEN_UNPROVEN": "new-run",
        }
    )
    assert settings.link_mbps == 87.5
    whens = (settings.when_leased, settings.when_in_place, settings.when_unproven)
    assert whens == ("skip", "copy", "new-run")
    assert settings.payload_format is WeightPayloadFormat.FULL_TENSOR
    assert settings.staging_mode is TrainerStagingMode.IN_PLACE
    assert (settings.anchor_every, settings.max_staleness, settings.index) == (3, 0, 2)


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_missing_variable_is_named(name: str) -> None:
    """Outside a run the error says which variable is missing and what to do."""
    with pytest.raises(PreflightError, match=rf"{name} not set; start it from a job file"):
        run_settings({key: value for key, value in NEEDED.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_PAYLOAD", "DELTA"),
        ("PACELINE_STAGING", "x"),
        ("PACELINE_WHEN_LEASED", "wait"),
        ("PACELINE_INDEX", "two"),
        ("PACELINE_LINK_MBPS", "-1"),
        ("PACELINE_LINK_MBPS", "nan"),
    ],
)
def test_a_word_that_nobody_knows_is_refused(name: str, value: str) -> None:
    """A typo is not read as a default."""
    with pytest.raises(UsageError, match=value):
        run_settings({**NEEDED, name: value})


def test_torchrun_says_how_many_processes_there_are_and_which_start_it_is() -> None:
    """Without torchrun a process publishes alone, and no start needs a name."""
    plain = run_settings(NEEDED)
    assert (plain.world_size, plain.incarnation) == (0, "")
    started = {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}
    settings = run_settings({**NEEDED, **started})
    assert (settings.world_size, settings.incarnation) == (4, "x/2")
