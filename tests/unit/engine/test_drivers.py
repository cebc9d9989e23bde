"""Kinds of engines: no module outside a kind's folder knows it, and another package adds one by an entry point."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import palestra
from palestra.config import parse_config
from palestra.config.engine import drivers, sections
from palestra.engine.driver import EngineDriver, EngineJob, driver_of

ROOT = Path(palestra.__file__).parents[1]
# What several tenants share is made of the embedded engine's parts, whatever kind a job's engine is; and the check of a
# harness has a model that follows a script.
MADE_OF_ONE = {
    "palestra_bases/commands/options.py",
    "palestra_bases/models.py",
    "palestra_bases/serving.py",
    "palestra_harness/scripted.py",
    "palestra_service/base_process.py",
}
KINDS = {*sections(), "mixed"}
OF_KINDS = {type(driver).__name__ for driver in drivers().values()} | {one.__name__ for one in sections().values()}
TOLD_BY_CLASS = OF_KINDS | {"MixedEngineConfig", "InferenceManager"}
NAMED = [*TOLD_BY_CLASS, *(f"['\"]{kind}['\"]|engine[.]{kind}" for kind in KINDS)]
WORDS = re.compile("|".join(NAMED))


def files() -> Iterator[tuple[str, ast.Module]]:
    folders = tuple(f"{above}/{kind}/" for above in ("palestra/engine", "palestra_engines") for kind in KINDS)
    for path in sorted(found for package in ROOT.glob("palestra*") for found in package.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(folders) and WORDS.search(text := path.read_text()):
            yield name, ast.parse(text)


def branches(tree: ast.Module) -> Iterator[int]:
    """Lines that ask for a kind: by its name, or by its section or driver."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue | ast.Dict):
            named = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value in KINDS}
            if named:
                yield node.lineno
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if names & TOLD_BY_CLASS:
                yield node.lineno


def test_no_module_branches_on_a_kind_of_engine():
    found = [f"{name}:{line}" for name, tree in files() for line in branches(tree)]
    assert found == []


def test_no_module_imports_what_is_in_the_folder_of_a_kind():
    beginnings = tuple(f"{above}.{kind}" for above in ("palestra.engine", "palestra_engines") for kind in KINDS)
    found = {
        name
        for name, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(beginnings)
    }
    assert found == MADE_OF_ONE


def test_each_kind_has_a_driver_and_a_section_of_its_name():
    assert sorted(drivers()) == ["embedded", "fake", "sglang", "vllm"]
    for kind, driver in drivers().items():
        assert isinstance(driver, EngineDriver)
        assert driver.section.model_fields["kind"].default == kind


PARROT = '''
from typing import ClassVar, Literal
from pydantic import Field
from palestra.config import PooledEngineConfig
from palestra.engine.driver import EngineDriver, EngineJob, driver_of, LoadedEngine, byte_policies


class ParrotConfig(PooledEngineConfig):
    """`kind = "parrot"`: repeats a word."""

    has_model: ClassVar[bool] = False
    kind: Literal["parrot"] = Field("parrot", description="The kind.")
    word: str = Field(description="What it says.")


class ParrotDriver(EngineDriver[ParrotConfig]):
    section = ParrotConfig

    def check(self, job, key, table):
        if not table.word:
            yield f"{key}.word", "a parrot needs a word"

    def load(self, job: EngineJob, table: ParrotConfig) -> LoadedEngine:
        from palestra.engine.fake import FakeEngine

        engine = FakeEngine(lambda prompt, sampling: [*table.word.encode(), 258])
        return LoadedEngine(engine, byte_policies(job.config))
'''
JOB = """
import asyncio, sys
import httpx2
from palestra import AsyncClient
from palestra.config import dump_config, parse_config
from palestra.errors import ConfigError
from palestra_inspect.checking import check_job
from palestra.runtime.local import local_job

async def run(folder, replicas):
    settings = {"steps": 1, "server": {"port": 0}, "evaluation": {"every_steps": 0}, "run_dir": folder}
    settings |= {"rollout": {"group_size": 2, "groups_per_step": 1}}
    settings |= {"engine": {"kind": "parrot", "word": "lora", "replicas": replicas}}
    async with local_job(parse_config(settings), lambda kind, data: None) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client, httpx2.AsyncClient() as http:
            await client.push_tasks([{"prompt": "?"}])
            for reward in (0.0, 1.0):
                async with client.episode() as episode:
                    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
                    headers = {"Authorization": f"Bearer {episode.policy.api_key}"}
                    reply = await http.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)
                    print(reply.json()["choices"][0]["message"]["content"])
                    episode.reward = reward
        await running
        print(job.progress.state.value)

if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
    config = parse_config({"engine": {"kind": "parrot", "word": ""}, "server": {"port": 0}})
    assert parse_config(__import__("tomllib").loads(dump_config(config))) == config
    print([finding.text for finding in check_job(config) if finding.key == "engine.word"])
    try:
        parse_config({"engine": {"kind": "parrot", "wort": "lora"}})
    except ConfigError as error:
        print(error)
"""


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder with a package of a stranger, as pip leaves it."""
    site = tmp_path / "site"
    (site / "parrot_engine-1.0.dist-info").mkdir(parents=True)
    (site / "parrot_engine.py").write_text(PARROT)
    info = site / "parrot_engine-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[palestra.engines]\nparrot = parrot_engine:ParrotDriver\n")
    return site


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_of_another_package_plays_a_job(installed, tmp_path, replicas):
    """In the job's own process, and in those of workers."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    paths = os.pathsep.join([str(installed), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), str(replicas)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "lora",
        "lora",
        "completed",
        "['a parrot needs a word']",
        "config: unknown key 'engine.wort'; did you mean 'word'?",
    ], done.stderr


@pytest.mark.parametrize(
    ("sync", "finishes"), [("any_time", False), ("between_replies", True), ("between_episodes", True)]
)
async def test_the_embedded_engine_finishes_replies_unless_weights_may_change_within_them(sync, finishes):
    config = parse_config(
        {
            "policies": {"policy": {"model": "tiny-random", "max_context": 64}},
            "rollout": {"weight_sync": sync},
            "engine": {"kind": "embedded", "threads": 1, "dtype": "float32"},
        }
    )
    loaded = driver_of(config.engine).load(EngineJob(config=config), config.engine)
    try:
        assert loaded.engine._finish is finishes
    finally:
        await loaded.engine.close()
