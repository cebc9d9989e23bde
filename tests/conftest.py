"""What all tests share: quiet arithmetic, no network, and the examples that hypothesis draws.

With the profile `quick`, the one of `make test`, and with `full`, that of `make test-rest`, hypothesis draws the same
examples in every run; with `--hypothesis-profile=search` it draws new ones.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from palestra import extensions
from palestra.models.device import reproducible_products

# Helpers of several folders, whose assertions are to say what differs; it has to be said before one imports them.
pytest.register_assert_rewrite("outcome", "servers")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order, and no quarrel about the cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Before the first product of this process, as a deterministic job does it in its own. Processes that tests start do it
# themselves (`environment` of integration/servers.py does not pass the variable on).
reproducible_products()

settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("quick"))
settings.register_profile("search", deadline=None, max_examples=1000, database=None)
settings.load_profile("quick")

# What pytest makes of the assertions of tests is kept for the next run even where PYTHONDONTWRITEBYTECODE is set: each
# worker takes longer to make it than to import all tests. While tests run, the setting holds again.
_kept, sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = _kept


# `pytest --core`: the core alone, as if nothing beside it were installed. Tests of what is beside it are left out: all
# that name one of its packages or what these bring, or import a helper which does; and `bench`, which measures all.
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
_TESTS = Path(__file__).parent
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="test the core without the packages beside it")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--core"):
        whole = extensions.entry_points
        extensions.entry_points = lambda **chosen: [one for one in whole(**chosen) if not _PACKAGE.match(one.module)]
        sys.meta_path.insert(0, _NotInstalled())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--core"):
        return None
    if collection_path.is_dir():
        if collection_path == _TESTS / "unit" / "bench":
            return True
        shared = collection_path / "conftest.py"
        return True if shared.is_file() and collection_path != _TESTS and _is_beside(shared) else None
    return (
        True
        if collection_path.suffix == ".py" and collection_path.parent != _TESTS and _is_beside(collection_path)
        else None
    )
