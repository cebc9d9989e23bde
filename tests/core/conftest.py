"""`pytest tests/core` tests the core alone, with the packages beside it hidden as if they were not installed.

The tests stay in the folders below. Left out are the files that name a package beside the core or what it brings, or
that import a helper which does, and `unit/bench`, which measures all packages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.metadata import distribution
from pathlib import Path

import pytest

from palestra import extensions

HERE = Path(__file__).parent
FOLDERS = ("unit", "integration", "property", "contract")

_POINTS = [point for point in distribution("palestra").entry_points if point.value.startswith("palestra_")]
_PACKAGE = re.compile(rf"\b(?:{'|'.join({point.module.partition('.')[0] for point in _POINTS})})\b")
_WORDS = {  # how tests name what a group brings; else in quotes
    "palestra.commands": r"""(?:\[|palestra\(|command\()\s*"{}\"""",
    "palestra.names": r"\b{}\b",
    "palestra.rules": r"palestra\.doctor\b|train/warnings|[\"']warning[\"']",
}
_BROUGHT = [
    _WORDS.get(point.group, r"""["'`/]{}["'`/]""").format(point.name) for point in _POINTS if point.name != "palestra"
]
_NAMED = re.compile("|".join([_PACKAGE.pattern, *_BROUGHT]))
_HELPERS = re.compile(r"^(?:from|import) ((?:unit|integration)\.[\w.]+|[a-z_]+)", re.MULTILINE)
_TESTS = HERE.parent
_PLACES = (_TESTS, _TESTS / "integration", _TESTS.parent / "scripts")


class _NotInstalled(MetaPathFinder):
    """Hides the packages beside the core."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if _PACKAGE.fullmatch(name.partition(".")[0]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@cache
def _is_beside(path: Path) -> bool:
    text = path.read_text()
    names = [name.replace(".", "/") + ".py" for name in _HELPERS.findall(text)]
    helpers = [place for name in names for above in _PLACES if (place := above / name).is_file() and place != path]
    return bool(_NAMED.search(text)) or any(map(_is_beside, helpers))


class _Folders(pytest.Dir):
    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        yield from super().collect()
        for name in FOLDERS:
            yield self.ihook.pytest_collect_directory(path=_TESTS / name, parent=self)


class _Selection:
    """A plug-in of its own: hooks of a conftest.py hold for the files of its folder only."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return _Folders.from_parent(parent, path=path) if path == HERE else None

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.is_dir():
            shared = collection_path / "conftest.py"
            beside = collection_path == _TESTS / "unit" / "bench" or (
                shared.is_file() and collection_path not in (_TESTS, HERE) and _is_beside(shared)
            )
        else:
            beside = collection_path.suffix == ".py" and collection_path.parent != HERE and _is_beside(collection_path)
        return True if beside else None


def _is_asked_for(config: pytest.Config) -> bool:
    named = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    return any(HERE in (path, *path.parents) for path in named)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if _is_asked_for(config) else True  # tests/core/test_alone.py with all tests


def pytest_configure(config: pytest.Config) -> None:
    if _is_asked_for(config):
        whole = extensions.entry_points
        extensions.entry_points = lambda **chosen: [one for one in whole(**chosen) if not _PACKAGE.match(one.module)]
        sys.meta_path.insert(0, _NotInstalled())
        config.pluginmanager.register(_Selection())
