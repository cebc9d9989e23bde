"""The reference pages are made from the code, and current."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from python_reference import BESIDE
from reference_pages import pages

import palestra
from palestra import errors

pytestmark = pytest.mark.ci

DOCS = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def made():
    return pages()


@pytest.mark.parametrize("name", ["metrics.md", "doctor.md", "configuration.md", "api.md", "python.md", "commands.md"])
def test_the_page_in_the_repository_is_what_the_code_says(made, name):
    assert (DOCS / name).read_text() == made[name], "run `make docs`"


def test_every_error_is_in_the_reference(made):
    page = made["python.md"]
    known = [name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)]
    assert [name for name in known if f"| `{name}` |" not in page] == []


def test_every_exported_name_has_a_sentence_and_a_place_for_the_rest(made):
    page = made["python.md"]
    for package in (palestra, *BESIDE):
        for name in package.__all__:
            assert f"\n::: {package.__name__}.{name}\n" in page
    assert "| `Chat` | One call of a model, token by token. |" in page


def test_every_key_of_the_configuration_has_a_meaning(made):
    rows = [line.split("|") for line in made["configuration.md"].splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows if not row[-2].strip()] == []


def _undescribed(found):
    for name, member in (
        [("__init__", found.__init__), *vars(found).items()] if isinstance(found, type) else [("", found)]
    ):
        if not inspect.isfunction(member) or (name.startswith("_") and name != "__init__"):
            continue
        text = inspect.getdoc(member) or ""
        if "Args:" in text:
            yield from (
                f"{found.__name__}.{name}: {parameter}"
                for parameter in list(inspect.signature(member).parameters)[isinstance(found, type) :]
                if not re.search(rf"^\s+(\w+, )*\*{{0,2}}{parameter}(, \w+)*:", text, re.MULTILINE)
            )


def test_what_users_import_describes_all_arguments_or_none():
    assert [
        line
        for package in (palestra, *BESIDE)
        for name in package.__all__
        for line in _undescribed(getattr(package, name))
        if callable(getattr(package, name))
    ] == []
