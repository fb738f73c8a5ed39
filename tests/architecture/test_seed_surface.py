"""The public contracts are complete: every name, field, default, value and signature is there."""

import abc
import dataclasses
import enum
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline.refit
import paceline.rental
from paceline.system import environ

_VECTORS = Path(__file__).parents[1] / "vectors" / "contracts"
_SRC = str(Path(__file__).parents[2] / "src")
_MODULES: dict[str, ModuleType] = {"rental": paceline.rental, "refit": paceline.refit}


def contract(half: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_VECTORS / f"{half}.json").read_text())
    return found


_CLASSES = [
    (half, name, facts) for half in _MODULES for name, facts in contract(half)["classes"].items()
]


def of_kind(kind: str) -> pytest.MarkDecorator:
    """Parametrize over the classes of the contracts that are of one kind."""
    chosen = [entry for entry in _CLASSES if kind_of(entry[2]) == kind]
    assert chosen, kind
    return pytest.mark.parametrize(("half", "name", "facts"), chosen, ids=[c[1] for c in chosen])


def kind_of(facts: dict[str, Any]) -> str:
    if any(text.startswith("dataclass") for text in facts["decorators"]):
        return "dataclass"
    if "Enum" in facts["bases"]:
        return "enum"
    return "error" if facts["bases"][0].endswith("Error") else "interface"


def text_of(annotation: object) -> str:
    """Return an annotation as the contract writes it, without module names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_][\w]*\.)+(?=[A-Z])", "", text).replace("torch.", "")


def public(half: str, name: str) -> Any:
    return getattr(_MODULES[half], name)


@pytest.mark.parametrize("half", ["rental", "refit"])
def test_every_name_is_exported(half: str) -> None:
    """Classes, functions, values and everything in the contract's own __all__ are public."""
    facts = contract(half)
    names = {*facts["classes"], *facts["functions"], *facts["values"], *(facts["all"] or [])}
    assert names <= set(_MODULES[half].__all__)
    exported = list(_MODULES[half].__all__)
    assert exported == sorted(exported, key=lambda name: (not name.isupper(), name))
    for name in _MODULES[half].__all__:
        assert hasattr(_MODULES[half], name)


@of_kind("dataclass")
def test_fields_are_the_same_in_order_type_and_default(
    half: str, name: str, facts: dict[str, Any]
) -> None:
    """The contract's fields come first, so positional use works; new ones have defaults."""
    cls = public(half, name)
    assert cls.__dataclass_params__.frozen
    ours = dataclasses.fields(cls)
    for field, expected in zip(ours, facts["fields"], strict=False):
        found = {"name": field.name, "type": text_of(field.type)}
        if field.default is not dataclasses.MISSING:
            found["default"] = repr(field.default)
        assert found == expected
        assert not field.kw_only
    assert len(ours) >= len(facts["fields"])
    for field in ours[len(facts["fields"]) :]:
        given = {field.default, field.default_factory} - {dataclasses.MISSING}
        assert given, f"{field.name} needs a default"
    for method in facts["methods"]:
        assert hasattr(cls, method)


@of_kind("enum")
def test_enum_values_and_their_text_are_the_same(
    half: str, name: str, facts: dict[str, Any]
) -> None:
    """Members, order, values, and what str() and format() give for a (str, Enum)."""
    cls = public(half, name)
    assert {member.name: member.value for member in cls} == facts["members"]
    assert [member.name for member in cls] == list(facts["members"])
    assert issubclass(cls, str)
    assert not issubclass(cls, enum.StrEnum)
    twin = enum.Enum(name, facts["members"], type=str)  # type: ignore[misc]
    assert [str(member) for member in cls] == [str(member) for member in twin]
    assert [f"{member}" for member in cls] == [f"{member}" for member in twin]


@of_kind("error")
def test_errors_have_the_same_parents(half: str, name: str, facts: dict[str, Any]) -> None:
    """Whoever caught the contract's class, or its parent, still does; one argument is enough."""
    cls = public(half, name)
    assert set(facts["bases"]) <= {parent.__name__ for parent in cls.__mro__[1:]}
    assert str(cls("what happened")) == "what happened"


@of_kind("interface")
def test_methods_are_the_same(half: str, name: str, facts: dict[str, Any]) -> None:
    """Names, parameters, kinds, defaults, types; what is abstract or a property stays so."""
    cls = public(half, name)
    for method, expected in facts["methods"].items():
        ours = inspect.getattr_static(cls, method)
        assert isinstance(ours, property) is ("property" in expected["decorators"])
        function = ours.fget if isinstance(ours, property) else ours
        check_signature(function, expected)
        is_abstract = getattr(function, "__isabstractmethod__", False)
        assert is_abstract is ("abstractmethod" in expected["decorators"])
    annotations = inspect.get_annotations(cls)
    for field in facts["fields"]:
        assert text_of(annotations[field["name"]]) == field["type"]
    assert getattr(cls, "_is_runtime_protocol", False) is (
        "runtime_checkable" in facts["decorators"]
    )
    assert issubclass(cls, abc.ABC) is ("ABC" in facts["bases"])
    if half == "rental":
        ours_public = {key for key in vars(cls) if not key.startswith("_")}
        assert ours_public <= {*facts["methods"], *(field["name"] for field in facts["fields"])}


@pytest.mark.parametrize(
    ("half", "name"), [(half, name) for half in _MODULES for name in contract(half)["functions"]]
)
def test_functions_are_the_same(half: str, name: str) -> None:
    """Names, parameters, kinds, defaults and types of plain functions."""
    check_signature(public(half, name), contract(half)["functions"][name])


def check_signature(function: Any, expected: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    ours = []
    for parameter in signature.parameters.values():
        found = {"name": parameter.name, "kind": parameter.kind.name}
        if parameter.annotation is not inspect.Parameter.empty:
            found["type"] = text_of(parameter.annotation)
        if parameter.default is not inspect.Parameter.empty:
            found["default"] = repr(parameter.default)
        ours.append(found)
    assert ours == [
        {key: text_of(value) if key == "type" else value for key, value in parameter.items()}
        for parameter in expected["parameters"]
    ]
    assert text_of(signature.return_annotation) == text_of(expected["returns"])


def test_the_registry_refuses_duplicates() -> None:
    """The second class under a name is a ValueError and the first one stays."""
    first = paceline.rental.register_backend("test-twice")(object)
    try:
        with pytest.raises(ValueError, match="test-twice"):
            paceline.rental.register_backend("test-twice")(int)
        assert paceline.rental.BACKEND_REGISTRY["test-twice"] is first
    finally:
        del paceline.rental.BACKEND_REGISTRY["test-twice"]


def test_the_front_doors_load_nothing_heavy() -> None:
    """Both halves can be imported without torch, grpc, pydantic or numpy being loaded."""
    program = (
        "import sys, paceline, paceline.rental, paceline.refit\n"
        "heavy = {'torch', 'grpc', 'pydantic', 'numpy', 'google.protobuf', 'httpx', 'psutil'}\n"
        "print(','.join(sorted(heavy & sys.modules.keys())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(environ()) | {"PYTHONPATH": _SRC},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""
