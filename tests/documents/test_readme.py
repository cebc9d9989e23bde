"""The front page: short, its figures are those of the pages that they link to, and the Chinese one says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documents.blocks import ROOT, blocks_of, prose_of
from documents.links import HEADING, LINK, anchors_of, broken

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")  # not those of names, such as H200, 0.6B


def figures_of(text: str) -> list[str]:
    """Return the numbers of a text, without the commas of thousands and lists."""
    return [found.replace(",", "") for found in FIGURE.findall(text)]


def measured(page: Path) -> list[tuple[list[str], str]]:
    """Return the rows of the table of measurements: figures, and the link to the section that has them."""
    rows = []
    for line in prose_of(page).splitlines():
        (*_, target) = LINK.findall(line) or [""]
        if line.startswith("| ") and re.match(r"docs/(benchmarks|learning)\.md#", target):
            rows.append((figures_of("|".join(line.split("|")[2:4])), target))
    return rows


def section(target: str) -> str:
    """Return the text below a heading, with all that is below it."""
    name, _, anchor = target.partition("#")
    page = ROOT / name
    assert anchor in anchors_of(page)
    lines = prose_of(page).splitlines()
    heads = [(n, line.index(" "), line) for n, line in enumerate(lines) if HEADING.fullmatch(line)]
    begin, level = next((n, level) for n, level, line in heads if slug(line) == anchor)
    end = next((n for n, other, _ in heads if n > begin and other <= level), len(lines))
    return "\n".join(lines[begin:end])


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_the_readme_is_short():
    assert len(ENGLISH.read_text().split()) <= 1200


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=lambda page: page.name)
def test_each_figure_is_in_the_section_that_its_row_links_to(page):
    rows = measured(page)
    assert len(rows) >= 10
    assert any("#on-a-gpu" in target for _, target in rows)
    strange = {(figure, target) for found, target in rows for figure in set(found) - set(figures_of(section(target)))}
    assert strange == set()
    assert all(found for found, _ in rows)


def test_the_chinese_readme_says_the_same():
    english, chinese = prose_of(ENGLISH), prose_of(CHINESE)
    assert [block.text for block in blocks_of(CHINESE)] == [block.text for block in blocks_of(ENGLISH)]
    assert [line.count("#") for line in chinese.splitlines() if HEADING.fullmatch(line)] == [
        line.count("#") for line in english.splitlines() if HEADING.fullmatch(line)
    ]
    assert measured(CHINESE) == measured(ENGLISH)
    targets = [set(LINK.findall(text)) - {"README.md", "README.zh.md"} for text in (english, chinese)]
    assert targets[0] == targets[1]
    assert broken(CHINESE) == []


def test_a_figure_is_no_part_of_a_name():
    assert figures_of("on one H200, a 0.6B shape: 4.27, 5.14 s; 24,015 tokens/s (SmolLM2-135M) 12.") == [
        *("4.27", "5.14", "24015", "12")
    ]
