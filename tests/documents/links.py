"""The links of the documents, and the anchors that they may name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from documents.blocks import prose_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
OUTSIDE = re.compile(r"[a-z]+:")


def links_of(page: Path) -> Iterator[str]:
    """Yield the targets of the links and pictures of a page that stay inside the repository."""
    text = re.sub(r"(`+)[^`].*?\1", "``", prose_of(page), flags=re.DOTALL)  # code spans have no links
    yield from (target for target in LINK.findall(text) if not OUTSIDE.match(target))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them; the site is told to make the same."""
    found: set[str] = set()
    for heading in HEADING.findall(prose_of(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(anchor)
    return found


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    wrong = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or (anchor and (aim.suffix != ".md" or anchor not in anchors_of(aim))):
            wrong.append(target)
    return wrong
