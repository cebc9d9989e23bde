"""The reference pages are made from the code, and current."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.cli.generate_docs import pages

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def made():
    return pages()


@pytest.mark.parametrize("name", ["metrics.md", "configuration.md", "api.md"])
def test_the_page_in_the_repository_is_what_the_code_says(made, name):
    assert (DOCS / name).read_text() == made[name], "run `make docs`"


def test_every_key_of_the_configuration_has_a_meaning(made):
    rows = [line.split("|") for line in made["configuration.md"].splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows if not row[-2].strip()] == []
