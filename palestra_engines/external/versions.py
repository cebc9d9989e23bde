"""Versions of other projects' servers, for comparison: major and minor number."""

from __future__ import annotations

from packaging.version import Version as ParsedVersion

Version = tuple[int, int]


def version_of(text: str) -> Version:
    """Return major and minor number of a version such as `0.32.0+cpu`; (0, 0): invalid."""
    try:
        found = ParsedVersion(text)
    except ValueError:  # also a number of many thousand digits
        return (0, 0)
    return found.major, found.minor


def dotted(version: Version) -> str:
    """Return a version in dotted form."""
    return ".".join(map(str, version))
