"""What the guides tell people to write keeps the contract that the guide names."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def run_guide(name: str) -> ModuleType:
    """Run all of a guide's Python as one module."""
    text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    module = ModuleType("guide_" + name.replace("-", "_"))
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile("\n".join(blocks), f"{name}.md", "exec"), module.__dict__)  # noqa: S102 - our text
    return module


backend = run_guide("add-a-backend")


class TestPricedBackend(backend.TestPriced):  # type: ignore[name-defined,misc]  # exists at run time
    """Rents in a state directory of its own."""

    @pytest.fixture(autouse=True)
    def _state_dir(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path))


TestCountingReader = run_guide("add-a-transport").TestCounting
TestNumpyTrainer = run_guide("add-a-trainer").TestNumpy
TestTableEngine = run_guide("add-a-generator").TestTable


def test_what_the_trainers_guide_declares() -> None:
    """Its policy and its rules do what the text around them says."""
    guide = run_guide("trainers")
    assert guide.policy.decide("l.gate.weight", held="F32") == ("F32", "*.gate.weight")
    assert guide.ready.decide("l.up.weight", held="F32") == ("BF16", "*")
    wanted = "decoder.layers.0.mlp.shared_experts.linear_fc2.weight"
    found = guide.named(wanted, guide.names, layers=[3])
    assert found.names == ("model.layers.3.mlp.shared_expert.down_proj.weight",)
