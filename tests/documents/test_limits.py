"""How long the pages are that people write, and what they are about."""

from __future__ import annotations

import pytest
from house import words_by_hand

from documents.blocks import ROOT

DOCS = ROOT / "docs"
KINDS = ("tutorials", "how-to", "reference", "explanation")
HOW_TO = sorted(DOCS.glob("how-to/*.md"))


@pytest.mark.parametrize("page", HOW_TO, ids=[page.stem for page in HOW_TO])
def test_a_how_to_answers_one_question(page):
    assert len(page.read_text().split()) <= 600


def test_architecture_can_be_read_at_once():
    assert len((DOCS / "explanation/architecture.md").read_text().split()) <= 3500


def test_what_is_written_by_hand_can_be_read():
    assert sum(words_by_hand(page) for page in DOCS.rglob("*.md")) <= 45_000


def test_a_page_is_of_one_of_four_kinds_or_says_what_was_measured():
    beside = {page.name for page in DOCS.glob("*.md")}
    assert beside == {"async.md", "benchmarks.md", "comparison.md", "contents.md", "learning.md"}
    assert {path.name for path in DOCS.iterdir() if path.is_dir()} == set(KINDS)
    assert len(list(DOCS.glob("tutorials/*.md"))) == 6


def test_what_a_command_writes_is_not_by_hand(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("one two\n<!-- measured by `make x`; do not edit from here -->\nthree\n<!-- to here -->\nfour\n")
    assert words_by_hand(page) == 3
    page.write_text("<!-- part -->\none\n<!-- end of part -->\ntwo\n")
    assert words_by_hand(page) == 1
    page.write_text("# Title\n\n<!-- made by `make x`; do not edit -->\n\nthree\n")
    assert words_by_hand(page) == 0
