"""The code blocks of the documents, and what the tests do with each.

`PYTHONPATH=tests python -m documents.blocks` counts them. The language of a block says what is done with it; a comment
on the line above, `<!-- test: … -->`, says what it needs besides. A block that has neither fails a test.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "recipes/README.md")
PAGES = sorted((*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in NAMES)))
FENCE = re.compile(r"^```(\S*)\s*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- test: (.+?) -->\n\Z")
GENERATED = "<!-- made by `make docs`"
BY_LANGUAGE = {
    "python": "executed: as a script",
    "toml": "parsed: a JobConfig",
    "bash": "parsed: its commands",
    "console": "parsed: its commands",
    "json": "parsed: JSON",
    "text": "not executed: a drawing, or what a program prints",
}
BY_MARK = {
    "in small": "executed: as a script, with tiny-random and one step",
    "needs a server": "executed: against a server",
    "needs a live run": "executed: against `palestra run` of the page's job, with tiny-random and fewer users",
    "needs a seat": "executed: against a server of a job with seats",
    "needs a game": "executed: against a server of a job with a free seat, with tiny-random and one step",
    "needs an environment server": "executed: against an environment server, with tiny-random and one step",
    "needs an episode": "executed: in a claimed episode",
    "needs a service": "executed: against `palestra serve`",
    "make frameworks": "executed: by `make frameworks`",
    "rules": "parsed: rules of a service",
    "comparison": "parsed: a ComparisonConfig",
    "another library": "not executed: needs a library that is not installed; its syntax is checked",
}
SIGNATURE = "parsed: a signature"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    page: Path
    line: int  # of the fence, from 1
    language: str
    mark: str | None  # what its comment says; None: it has none
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def rule(self) -> str | None:
        """What is done with the block; None: nothing says it."""
        if self.mark is not None:
            return BY_MARK.get(self.mark)
        if self.page.read_text().startswith(GENERATED) and re.fullmatch(r"\w+\(.*\).*\n", self.text):
            return SIGNATURE
        return BY_LANGUAGE.get(self.language)


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        mark = MARK.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page=page, line=line, language=fence[1], mark=mark[1] if mark else None, text=fence[2]))
    return found


def prose_of(page: Path) -> str:
    """Return a page without its blocks, line for line."""
    return FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def with_rule(rule: str) -> list[Block]:
    """Return the blocks with which this is done."""
    return [block for block in BLOCKS if block.rule == rule]


def summary() -> str:
    """Return how many blocks there are of each rule, and which are not executed."""
    counts = Counter(str(block.rule) for block in BLOCKS)
    lines = [f"{count:4}  {rule}" for rule, count in sorted(counts.items())]
    lines += [f"      {block.name}: {block.rule}" for block in BLOCKS if str(block.rule).startswith("not executed")]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary())
