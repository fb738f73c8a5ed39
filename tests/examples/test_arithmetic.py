"""The example's task is what its README says."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "arithmetic"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task = _load("task")
NUMBERS = st.integers(0, task.HIGHEST)


@given(left=NUMBERS, right=NUMBERS)
def test_right_answer_alone_scores_one(left: int, right: int) -> None:
    """The exact answer, units first, scores 1; the same with a digit too many scores 0."""
    problem = task.Problem(left, right)
    assert task.reward(problem, problem.answer) == 1.0
    assert task.reward(problem, problem.answer + "0") == 0.0
    assert int(problem.answer[::-1]) == left + right
    assert task.parse_prompt(problem.prompt) == problem


@given(left=NUMBERS, right=NUMBERS, text=st.text(max_size=6))
def test_no_text_scores_outside_its_range(left: int, right: int, text: str) -> None:
    """A wrong answer scores at most two digits in place of three."""
    problem = task.Problem(left, right)
    score = task.reward(problem, text)
    assert score == 1.0 if text == problem.answer else 0.0 <= score <= 1 / 3


def test_an_engine_can_start_from_what_is_saved(tmp_path: Path) -> None:
    """Configuration and tokenizer are enough to build the model, weights come later."""
    task.save_task(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    ids = tokenizer("12+34=641<eos>")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+34=641"
    assert 1e6 < sum(each.numel() for each in model.parameters()) < 5e6


@pytest.mark.parametrize("seed", [0, 1])
def test_problems_depend_on_the_seed_alone(seed: int) -> None:
    """Two machines draw the same data."""
    assert task.problems(50, seed) == task.problems(50, seed)
    assert task.problems(50, seed) != task.problems(50, seed + 2)
