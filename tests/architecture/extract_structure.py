"""Write down the structure of a Python file: names, kinds, order and defaults, no texts.

    python tests/architecture/extract_structure.py SOURCE TARGET.json

Used once per contract; the results are in tests/vectors/contracts and are what our public
surface is compared with.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any


def structure_of(source: str) -> dict[str, Any]:
    """Return classes, functions, module values and ``__all__`` of a module."""
    found: dict[str, Any] = {"classes": {}, "functions": {}, "values": [], "all": None}
    for node in _without_leading_text(source).body:
        if isinstance(node, ast.ClassDef):
            found["classes"][node.name] = _class(node)
        elif isinstance(node, ast.FunctionDef):
            found["functions"][node.name] = _function(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found["values"].append(node.target.id)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found["all"] = ast.literal_eval(node.value)
    return found


def _without_leading_text(source: str) -> ast.Module:
    """Parse from the first line that is code: a file may begin with words about its origin."""
    lines = source.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(('"""', "#", "from ")))
    return ast.parse("\n".join(lines[first:]))


def _class(node: ast.ClassDef) -> dict[str, Any]:
    fields = [_field(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    members = {
        ast.unparse(item.targets[0]): ast.literal_eval(item.value)
        for item in node.body
        if isinstance(item, ast.Assign)
    }
    methods = {
        item.name: _function(item) for item in node.body if isinstance(item, ast.FunctionDef)
    }
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "decorators": [ast.unparse(decorator) for decorator in node.decorator_list],
        "fields": fields,
        "members": members,
        "methods": methods,
    }


def _field(node: ast.AnnAssign) -> dict[str, str]:
    found = {"name": ast.unparse(node.target), "type": ast.unparse(node.annotation)}
    return found if node.value is None else found | {"default": ast.unparse(node.value)}


def _function(node: ast.FunctionDef) -> dict[str, Any]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    params = [
        _parameter(
            arg, "POSITIONAL_OR_KEYWORD", None if n < missing else arguments.defaults[n - missing]
        )
        for n, arg in enumerate(positional)
    ]
    params += [
        _parameter(arg, "KEYWORD_ONLY", default)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return {
        "decorators": [ast.unparse(decorator) for decorator in node.decorator_list],
        "parameters": params,
        "returns": None if node.returns is None else ast.unparse(node.returns),
    }


def _parameter(arg: ast.arg, kind: str, default: ast.expr | None) -> dict[str, str]:
    found = {"name": arg.arg, "kind": kind}
    if arg.annotation is not None:
        found["type"] = ast.unparse(arg.annotation)
    return found if default is None else found | {"default": ast.unparse(default)}


if __name__ == "__main__":
    _source, _target = map(Path, sys.argv[1:])
    _target.write_text(json.dumps(structure_of(_source.read_text()), indent=1) + "\n")
