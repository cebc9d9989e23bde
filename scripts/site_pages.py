"""Add to the site what lies outside docs/: the front page from README.md, the recipes, and the pages of the project.

mkdocs calls the functions of this file (`hooks` of mkdocs.yml) while it builds. A link to such a page leads to the
place that it has in the site; a link to any other file becomes plain text, because the site has no repository.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {  # file of the repository: page of the site
    "README.md": "index.md",
    "README.zh.md": "zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "recipes/index.md",
    **{f"recipes/{path.name}": f"recipes/{path.stem}.md" for path in sorted((ROOT / "recipes").glob("*.py"))},
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"<(?:link|script|img|iframe)[^>]+(?:href|src)=\"?(?:https?:)?//[^>]+>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES`."""
    for source, target in PAGES.items():
        path = ROOT / source
        text = path.read_text() if path.suffix == ".md" else recipe(path)
        files.append(File.generated(config, target, content=with_links(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page of docs/ into the site; those of added pages were led there when they were added."""
    if page.file.generated_by is not None:
        return markdown
    return with_links(markdown, f"docs/{page.file.src_uri}")


def on_post_build(config: MkDocsConfig) -> None:
    """Look whether any page would fetch something from another server.

    Raises:
        PluginError: one would.
    """
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := OUTSIDE.search(path.read_text()):
            raise PluginError(f"{path} fetches from another server: {found[0]}")


def recipe(path: Path) -> str:
    """Return the page of a recipe: its first sentence as the heading, and all of its text."""
    text = path.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or path.stem).splitlines()[0]
    title = first.split(":")[0].rstrip(".")
    head = f"---\nhide: [toc]\n---\n\n# {title}\n\n[All recipes](README.md)\n\n"
    return f'{head}```python title="recipes/{path.name}"\n{text}```\n'


def title_of(path: Path) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return path.stem if found is None else found[1]


def with_links(text: str, source: str) -> str:
    """Return Markdown with the links of `source`, a file of the repository, as the site has them."""

    def led(found: re.Match[str]) -> str:
        picture, name, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, hash_sign, anchor = target.partition("#")
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = PAGES.get(aim) or (aim.removeprefix("docs/") if aim.startswith("docs/") else None)
        if place is None:
            return found[0] if picture else name
        if posixpath.basename(name) == posixpath.basename(path) and aim.endswith(".md"):
            name = title_of(ROOT / aim)  # a reader of the site knows pages by their titles, not by their files
        here = PAGES.get(source) or source.removeprefix("docs/")
        return f"{picture}[{name}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{hash_sign}{anchor})"

    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(led, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(led, text[end:])])
