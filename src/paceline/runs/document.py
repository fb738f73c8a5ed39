"""YAML text as plain values that remember their lines. Bounded: the text comes from outside."""

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

BYTES_MAX = 256 * 1024
NODES_MAX = 10_000
DEPTH_MAX = 20
SHOWN_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake in a job file."""

    line: int
    """From 1."""
    path: str
    """Keys from the top, joined by dots; empty for the file as a whole."""
    message: str


class Document:
    """Plain values and the line that each path came from."""

    def __init__(self) -> None:
        self.value: object = None
        self._lines: dict[tuple[str, ...], int] = {}
        self.is_read = False
        """Whether all of the text became values; a key that is there twice has its first one."""
        self._nodes = 0
        self._twice: list[Problem] = []

    @classmethod
    def read(cls, data: bytes, problems: list[Problem]) -> "Document":
        """Compose YAML; what is wrong with the text itself goes to ``problems``."""
        tree = cls()
        try:
            tree._fill(data)
            tree.is_read = True
        except _TextError as exc:
            problems.append(Problem(line=exc.line, path="", message=str(exc)))
        except UnicodeDecodeError as exc:
            line = data.count(b"\n", 0, exc.start) + 1
            problems.append(Problem(line=line, path="", message="not UTF-8 text"))
        except RecursionError:
            problems.append(Problem(line=1, path="", message="nested too deeply"))
        except yaml.YAMLError as exc:
            mark = getattr(exc, "problem_mark", None)
            what = getattr(exc, "problem", None) or str(exc).splitlines()[0]
            line = mark.line + 1 if mark else 1
            problems.append(Problem(line=line, path="", message=f"not YAML: {what}"))
        problems += tree._twice
        return tree

    def _fill(self, data: bytes) -> None:
        if len(data) > BYTES_MAX:
            raise _TextError(1, f"larger than {BYTES_MAX} bytes; a job file is small")
        root = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
        self.value = None if root is None else self._convert(root, (), 0)

    def line(self, path: tuple[str, ...]) -> int:
        """Return the line of the nearest thing on ``path`` that the file has."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _convert(self, node: yaml.Node, path: tuple[str, ...], depth: int) -> object:
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > NODES_MAX or depth > DEPTH_MAX:
            raise _TextError(line, f"more than {NODES_MAX} values, or nested over {DEPTH_MAX} deep")
        self._lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path, depth))
        if isinstance(node, yaml.SequenceNode):
            return [
                self._convert(item, (*path, str(index)), depth + 1)
                for index, item in enumerate(node.value)
            ]
        return _scalar(node)

    def _pairs(
        self, node: yaml.MappingNode, path: tuple[str, ...], depth: int
    ) -> Iterator[tuple[str, object]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise _TextError(line, "a key must be plain text")
            key = _text(key_node)
            if key in seen:
                message = f"key {shown(key)} is there already, on line {seen[key]}"
                self._twice.append(Problem(line=line, path="", message=message))
                continue
            seen[key] = line
            self._lines[(*path, key)] = line
            yield key, self._convert(value_node, (*path, key), depth + 1)


class _TextError(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _text(node: yaml.Node) -> str:
    """Return a scalar's text; YAML can spell half a character, which no file takes."""
    text = str(node.value)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        line = node.start_mark.line + 1
        raise _TextError(line, f"{shown(text)} holds a lone surrogate, which is no text") from exc
    return text


def _scalar(node: yaml.Node) -> object:
    """Return null, booleans and numbers as such; everything else, dates too, as its text."""
    kind = node.tag.rpartition(":")[2]
    text = _text(node)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in {"yes", "true", "on"}
    try:
        if kind == "int":
            return int(text.replace("_", ""), 10)
        if kind == "float":
            return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:  # 0x1f, 1:30 and the like: text, which the section then refuses or takes
        return text
    return text


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, and never the inside of a structure."""
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    text = {"NoneType": "nothing", "dict": "a mapping", "list": "a list"}.get(text, text)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."
