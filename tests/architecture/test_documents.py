"""What documents point to exists, and what users import says what it is."""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import click
import pytest

from paceline.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if "tests" not in path.parts
)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: object) -> str:
    return str(Path(str(path)).relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [code for language, code in BLOCK.findall(text) if language in languages]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link is a file or folder of the repository."""
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if ":" not in link]
    missing = [link for link in targets if not (path.parent / link).exists()]
    assert missing == []


def test_readme_shows_the_way() -> None:
    """The README's last section links to what a reader looks for next."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Find your way")[2]
    links = set(LINK.findall(text))
    assert {"docs/architecture.md", "docs/glossary.md", "docs/guides/", "CONTRIBUTING.md"} <= links


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_in_documents_imports_what_exists(path: Path) -> None:
    """Every name that a Python example takes from paceline is there."""
    for code in blocks(path, "python"):
        for module, name in names_used(ast.parse(code)):
            found = importlib.import_module(module)
            is_module = hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None
            assert is_module or hasattr(found, name), f"{module}.{name}"


def names_used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every name that is taken from a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).rpartition(".")
            if re.fullmatch(r"paceline(\.[a-z_]+)*", module):
                yield module, name


def commands_in(path: Path) -> Iterator[list[str]]:
    """Yield the words after ``paceline`` of every command line that a document shows."""
    for code in blocks(path, "", "sh", "bash", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            if re.match(r"(\$ )?(\.venv/bin/)?paceline ", line):
                words = shlex.split(line.removeprefix("$ "), comments=True)
                yield words[1:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_in_documents_exist(path: Path) -> None:
    """Every ``paceline`` line in a document names a verb and options that there are."""
    for words in commands_in(path):
        command: click.Command = cli
        rest = list(words)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            context = click.Context(command)
            found = command.get_command(context, rest[0])
            assert found is not None, words
            command, rest = found, rest[1:]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        used = {word for word in rest if word.startswith("--") and word != "--"}
        assert used <= known, words


PUBLIC = [
    (package, name)
    for package in ("paceline.rental", "paceline.refit")
    for name in importlib.import_module(package).__all__
]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=str)
def test_public_names_say_what_they_are(package: str, name: str) -> None:
    """A class or function has a docstring of its own, a constant a string under it."""
    found = getattr(importlib.import_module(package), name)
    if inspect.isclass(found) or inspect.isfunction(found):
        text = found.__doc__ or ""
        # The text that dataclass makes up when there is none.
        assert text.strip()
        assert not text.startswith(f"{name}(")
        if inspect.isclass(found) and found.__bases__ != (object,):
            assert "__doc__" in vars(found)
    else:
        assert constant_has_text(home_of(package, name), name)


def home_of(package: str, name: str) -> str:
    """Return the module from which a package takes a name."""
    source = inspect.getsource(importlib.import_module(package))
    homes = [
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
    ]
    assert homes[0] is not None
    return homes[0]


def constant_has_text(module: str, name: str) -> bool:
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for assignment, after in pairwise(body):
        targets = getattr(assignment, "targets", [getattr(assignment, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False
