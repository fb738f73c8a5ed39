"""What tests of real processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.operating import Operator


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    one = Operator(tmp_path)
    yield one
    one.end_all()
