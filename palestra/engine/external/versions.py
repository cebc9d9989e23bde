"""Versions of other projects' servers, as far as it matters which is older: major and minor number."""

from __future__ import annotations

Version = tuple[int, int]
_DIGITS = 9


def version_of(text: str) -> Version:
    """Return major and minor number of a version such as `0.32.0+cpu`; (0, 0): it is none."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if all(map(_is_number, (major, minor))) else (0, 0)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS  # int() reads neither all digits nor any number


def dotted(version: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))
