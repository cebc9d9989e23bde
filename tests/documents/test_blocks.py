"""What can be checked of the documents without running them: blocks, commands, configurations, names of keys, links."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from documents.blocks import BLOCKS, BY_LANGUAGE, BY_MARK, PAGES, ROOT, SIGNATURE, Block, prose_of, summary, with_rule
from documents.commands import lines_of, saved_by, trouble
from documents.links import broken, links_of
from palestra.cli.run import job_of
from palestra.config import JobConfig, parse_config
from palestra.config.section import Section, sections_of
from palestra_lab.config import load_comparison
from palestra_service.jobs.rules import load_rules

pytestmark = pytest.mark.ci

SECTIONS = {name for name, field in JobConfig.model_fields.items() if "Config" in str(field.annotation)}
KEY = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_*]+)+)(?: = [^`]*)?`")


def named(blocks: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=[block.name for block in blocks])


def of_pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def test_every_block_says_what_is_done_with_it():
    print(summary())
    assert [block.name for block in BLOCKS if block.rule is None] == []
    executed, parsed, neither = (
        sum(str(block.rule).startswith(kind) for block in BLOCKS) for kind in ("executed", "parsed", "not executed")
    )
    assert executed + parsed + neither == len(BLOCKS)
    assert executed >= 16
    python = [block for block in BLOCKS if block.language == "python" and block.rule != SIGNATURE]
    spared = [block for block in python if not str(block.rule).startswith("executed")]
    assert {block.rule for block in spared} <= {BY_MARK["another library"]}
    assert len(spared) <= len(python) / 4


@named(with_rule(BY_LANGUAGE["toml"]))
def test_a_configuration_is_one(block):
    job_of(tomllib.loads(block.text), {}, "the block")


@named(with_rule(BY_MARK["rules"]))
def test_the_rules_of_a_service_are_rules(block, tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text(block.text.replace("/srv/models/house-7b", str(tmp_path)))  # a folder that is there
    assert load_rules(file).caps


@named(with_rule(BY_MARK["comparison"]))
def test_a_comparison_is_one(block, tmp_path):
    (tmp_path / "compare.toml").write_text(block.text)
    comparison = load_comparison(tmp_path / "compare.toml")
    for key, algorithm in comparison.algorithms.items():
        parse_config({"algorithm": {"name": algorithm.name or key, **algorithm.settings}, **algorithm.overrides})


@pytest.mark.skipif(not with_rule(BY_LANGUAGE["json"]), reason="no page has JSON")
def test_json_is_json():
    for block in with_rule(BY_LANGUAGE["json"]):
        json.loads(block.text)


@named(with_rule(BY_LANGUAGE["bash"]))
def test_commands_can_be_given_so(block):
    commands = list(lines_of(block))
    assert commands
    saved = saved_by(block.page)
    assert {" ".join(words): said for words in commands if (said := trouble(words, saved)) is not None} == {}


@named(with_rule(SIGNATURE))
def test_a_signature_reads_as_one(block):
    ast.parse(f"def {block.text.strip().replace(chr(0x2026), '...')}: ...")


@named(with_rule(BY_MARK["another library"]))
def test_what_needs_another_library_has_no_mistake_of_syntax(block):
    assert ast.parse(block.text).body if block.language == "python" else shlex.split(block.text)


@of_pages()
def test_commands_within_the_text_exist(page):
    wrong = []
    for command in re.findall(r"`((?:palestra|make) [a-z][^`]*)`", prose_of(page)):
        words = re.split(r"[ ,]", command)
        known = [words[0], "--help"] if words[0] == "palestra" else []
        said = trouble([words[0], words[1], *known[1:]])
        if said is not None:
            wrong.append((command, said))
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.stem)
def test_keys_of_a_configuration_within_the_text_exist(page):  # the changelog names keys of earlier versions
    names = [found[1] for found in KEY.finditer(prose_of(page))]
    assert [name for name in names if not is_key(name.split("."))] == []


POLICIES = ("policy", "walker", "player")  # of the texts, and of the recipes that are compared


def is_key(path: list[str]) -> bool:
    """Return whether a job's configuration has the key, or the section."""
    models: list[type[Section]] = [JobConfig]
    for place, name in enumerate(path):
        if name == "*" or (place == 1 and (path[0] == "roles" or (path[0] == "policies" and name in POLICIES))):
            continue
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [model for field in fields for model in sections_of(field.annotation)]
    return True


@of_pages()
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_page_names_every_page():
    contents = ROOT / "docs/contents.md"
    linked = {(contents.parent / target.partition("#")[0]).resolve() for target in links_of(contents)}
    assert set(PAGES) - {contents, ROOT / "README.md"} <= linked


def test_what_finds_broken_links_finds_them(tmp_path):
    page = Path(tmp_path / "page.md")
    page.write_text(
        "# A `b.c`: d\n\n[1](#a-bc-d) [2](#nowhere) [3](other.md) ![4](no.png) `[5](no.md)` [6](https://x)\n"
    )
    assert broken(page) == ["#nowhere", "other.md", "no.png"]
