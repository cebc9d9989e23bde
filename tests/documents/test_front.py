"""What stands at the front of the repository runs what CI runs, and names what is there."""

from __future__ import annotations

import re
import tomllib

from documents.blocks import ROOT
from documents.commands import TARGET
from documents.links import broken
from palestra import __version__


def made(path: str) -> list[str]:
    """Return the targets of make that a file of CI runs, in order."""
    return re.findall(r"^(?:\s*- run: )?make ([a-z-]+)$", (ROOT / path).read_text(), re.MULTILINE)


def test_the_workflow_makes_what_ci_makes():
    steps = made(".github/workflows/test.yml")
    assert steps == made(".ci/run") == ["machine", "wheel", "docs-site", "test", "test-ci"]
    assert '["3.11", "3.12"]' in (ROOT / ".github/workflows/test.yml").read_text()
    assert made(".github/workflows/release.yml") == ["release"]
    assert {*steps, "release", "container"} <= set(TARGET.findall((ROOT / "Makefile").read_text()))


def test_the_hooks_are_the_linters_of_make_test():
    hooks = re.findall(r"entry: \.venv/bin/([\w-]+(?: check| format)?)", (ROOT / ".pre-commit-config.yaml").read_text())
    recipes = re.findall(
        r"^\t\$\(BIN\)/((?:ruff|mypy|lint-imports)(?: check| format)?)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(hooks) == set(recipes) == {"ruff format", "ruff check", "mypy", "lint-imports"}


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_templates_lead_somewhere():
    pages = [*(ROOT / ".github").rglob("*.md")]
    assert {page.name: broken(page) for page in pages} == {page.name: [] for page in pages}
    assert len(pages) == 3


def test_what_the_source_of_a_release_has_is_there():
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert all((ROOT / name).exists() for name in hatch["sdist"]["only-include"])


def test_the_container_copies_what_is_there_and_is_no_root():
    text = (ROOT / "Containerfile").read_text()
    assert re.search(r"^USER palestra$", text, re.MULTILINE)
    seen = [line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")]
    assert all(any(ROOT.glob(name)) for name in seen)
    assert {name for name in re.findall(r"requirements[\w-]*\.lock", text)} <= set(seen)


def test_the_newest_version_takes_a_page_of_the_changelog():
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert len(newest.split()) <= 1000
