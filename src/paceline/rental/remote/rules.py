"""Include and exclude patterns with rsync's meaning, for the copy that has no rsync. Pure.

The rules are those of rsync's manual, section "Pattern matching rules": the first match
decides, a leading slash anchors at the root of the transfer, a trailing slash asks for a
directory, ``*`` and ``?`` stop at slashes, ``**`` does not, and ``dir/***`` is a directory with
all that is in it. Names are matched as bytes, as rsync does. What an excluded directory
contains is never looked at: pruning is the walker's part.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import UsageError

_WILDCARDS = "*?["
_POSIX_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
_NEVER = r"(?!)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Which files of a tree are meant, and what happens to the others on the far side."""

    includes: tuple[str, ...]
    excludes: tuple[str, ...]
    delete: bool = False

    def rules(self) -> tuple["Rule", ...]:
        """Return the patterns, compiled."""
        return compile_rules(includes=self.includes, excludes=self.excludes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One pattern, compiled."""

    is_include: bool
    only_directories: bool
    slash_before: bool
    """Match against the path with a slash put before it (patterns that start with ``**``)."""
    slash_after: bool
    """A directory is matched with a slash put behind it (patterns that end with ``/***``)."""
    expression: re.Pattern[bytes]

    def matches(self, path: str, *, is_dir: bool) -> bool:
        """Return whether this rule speaks of ``path``, relative to the root of the transfer."""
        if self.only_directories and not is_dir:
            return False
        before = "/" if self.slash_before else ""
        after = "/" if self.slash_after and is_dir else ""
        return self.expression.fullmatch(_to_bytes(before + path + after)) is not None


def compile_rules(*, includes: Iterable[str], excludes: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules in order of precedence: an include wins over an exclude.

    Raises:
        UsageError: an empty pattern.
    """
    return tuple(
        [_compile(pattern, is_include=True) for pattern in includes]
        + [_compile(pattern, is_include=False) for pattern in excludes]
    )


def is_excluded(rules: Iterable[Rule], path: str, *, is_dir: bool) -> bool:
    """Return what the first matching rule says; a path that none speaks of is copied."""
    for rule in rules:
        if rule.matches(path, is_dir=is_dir):
            return not rule.is_include
    return False


def refuse_empty(pattern: str) -> None:
    """Raise UsageError for a pattern that rsync would not take."""
    if not pattern:
        raise UsageError("an include or exclude pattern is empty; remove it, or write '*' for all")


def _compile(pattern: str, *, is_include: bool) -> Rule:
    refuse_empty(pattern)
    only_directories = len(pattern) > 1 and pattern.endswith("/")
    body = pattern.removesuffix("/") if only_directories else pattern
    is_anchored = body.startswith("/")
    body = body.removeprefix("/")
    is_wild = any(char in body for char in _WILDCARDS)
    starts_wide = body.startswith("**") and not is_anchored
    expression = _translate(body) if is_wild else re.escape(body)
    if not is_anchored and not starts_wide:
        expression = r"(?:.*/)?" + expression
    return Rule(
        is_include=is_include,
        only_directories=only_directories,
        slash_before=starts_wide,
        slash_after=body.endswith("***"),
        expression=re.compile(_to_bytes(expression), re.DOTALL),
    )


def _translate(body: str) -> str:
    """Return the regular expression for a pattern with wildcards."""
    parts: list[str] = []
    at = 0
    while at < len(body):
        part, at = _next_part(body, at)
        parts.append(part)
    return "".join(parts)


def _next_part(body: str, at: int) -> tuple[str, int]:
    char = body[at]
    if char == "*":
        end = at
        while end < len(body) and body[end] == "*":
            end += 1
        return (r".*" if end - at > 1 else r"[^/]*"), end
    if char == "?":
        return r"[^/]", at + 1
    if char == "[":
        return _next_class(body, at)
    if char == "\\":
        if at + 1 == len(body):
            return _NEVER, at + 1
        return re.escape(body[at + 1]), at + 2
    return re.escape(char), at + 1


def _next_class(body: str, at: int) -> tuple[str, int]:
    """Translate ``[...]``; one that never closes matches nothing."""
    at += 1
    is_negated = body[at : at + 1] in ("!", "^")
    at += is_negated
    members: list[str] = []
    is_first = True
    while at < len(body) and (is_first or body[at] != "]"):
        is_first = False
        member, at = _next_member(body, at)
        members.append(member)
    if at >= len(body):
        return _NEVER, at
    inside = "".join(members)
    if is_negated:
        return f"[^/{inside}]", at + 1
    return (f"(?!/)[{inside}]" if inside else _NEVER), at + 1


def _next_member(body: str, at: int) -> tuple[str, int]:
    """Translate one member of a class: a named class, a range or a character."""
    if body.startswith("[:", at):
        end = body.find(":]", at + 2)
        if end > 0 and body[at + 2 : end] in _POSIX_CLASSES:
            return _POSIX_CLASSES[body[at + 2 : end]], end + 2
    low, at = _next_character(body, at)
    if body[at : at + 1] == "-" and body[at + 1 : at + 2] not in ("", "]"):
        high, at = _next_character(body, at + 1)
        # A range that runs backwards holds nothing.
        return (f"{re.escape(low)}-{re.escape(high)}" if low <= high else ""), at
    return re.escape(low), at


def _next_character(body: str, at: int) -> tuple[str, int]:
    if body[at] == "\\" and at + 1 < len(body):
        return body[at + 1], at + 2
    return body[at], at + 1


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
