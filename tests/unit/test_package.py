from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import palestra

pytestmark = pytest.mark.ci

LIGHT = ["palestra", "palestra.client", "palestra.types", "palestra.envs", "palestra.config", "palestra.errors"]
HEAVY = ("torch", "ray", "transformers")
ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("palestra*/__init__.py"))


def modules_of(package: str) -> list[str]:
    found = __import__(package, fromlist=["_"])
    if package == "palestra" or not hasattr(found, "__path__"):
        return [package]
    return [package, *(m.name for m in pkgutil.walk_packages(found.__path__, package + "."))]


def test_importing_the_light_rooms_loads_neither_torch_nor_ray_nor_transformers():
    names = [name for room in LIGHT for name in modules_of(room)]
    assert "palestra.types.records" in names
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import palestra\n"
        "palestra.Client, palestra.JobConfig, palestra.load_config, palestra.RolloutResult\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_server_without_a_model_loads_no_torch():
    rooms = "palestra.database, palestra.store, palestra.server, palestra.session, palestra.renderers"
    code = f"import sys, {rooms}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_process_of_a_job_with_the_fake_engine_loads_no_torch(tmp_path):
    """Ray starts it from `palestra_service.ray.servers`; hundreds of them fit on a machine because of this."""
    code = f"""
import asyncio, sys
import palestra_service.ray.servers
from palestra import AsyncClient
from palestra.config import parse_config
from palestra.runtime.local import local_job

async def run():
    settings = {{"steps": 1, "engine": {{"kind": "fake"}}, "server": {{"port": 0}}, "evaluation": {{"every_steps": 0}}}}
    settings |= {{"rollout": {{"group_size": 2, "groups_per_step": 1}}, "run_dir": {str(tmp_path / "run")!r}}}
    async with local_job(parse_config(settings), lambda kind, data: None) as job:
        running = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{{"prompt": "?"}}])
            for reward in (0.0, 1.0):
                async with client.episode() as episode:
                    episode.reward = reward
        await running

asyncio.run(run())
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


SUBMITTED = """
import sys
for name in ("torch", "transformers", "ray", "numpy", "sqlalchemy", "fastapi", "starlette", "uvicorn", "openai"):
    sys.modules[name] = None  # as where the client alone is installed
from palestra.cli.main import main
from palestra_control.control import ControlClient
ControlClient.submit = lambda self, given, **more: sys.exit(f"submits {given['name']}")
main(["submit", sys.argv[1], "--control", "http://127.0.0.1:1"])
"""


def test_the_client_alone_submits_a_job_with_its_tasks(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"text": "a"}\n')
    job = tmp_path / "job.toml"
    job.write_text('name = "mine"\nsteps = 1\ntasks.train = "tasks.jsonl"\n[engine]\nkind = "fake"\n')
    command = [sys.executable, "-c", SUBMITTED, job]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60)
    assert done.stderr == "submits mine\n"


def test_type_checkers_read_the_annotations_of_every_package():
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_every_package_is_built_checked_and_held_by_the_contracts():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    built, linter = tool["hatch"]["build"]["targets"], tool["importlinter"]
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    core = contracts["The core imports nothing that is beside it"]
    alone = contracts["What is beside the core stands alone, and the service and the lab use it"]
    assert sorted(built["wheel"]["packages"]) == PACKAGES
    assert [name for name in PACKAGES if name not in built["sdist"]["only-include"]] == []
    assert sorted(tool["mypy"]["packages"]) == sorted(linter["root_packages"]) == PACKAGES
    assert sorted(["palestra", *core["forbidden_modules"]]) == PACKAGES
    assert sorted(["palestra", *alone["source_modules"], *alone["forbidden_modules"]]) == PACKAGES
    assert sorted(contracts["No cycles"]["ancestors"]) == PACKAGES


def test_what_the_package_exports_is_what_its_reference_has():
    """So that a name which comes or goes is seen in the pages for users."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert sorted(re.findall(r"^::: palestra\.(\w+)$", page, re.MULTILINE)) == palestra.__all__
    assert dir(palestra) == palestra.__all__


def test_type_checkers_see_what_is_exported():
    tree = ast.parse(Path(palestra.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {alias.asname: found.module for found in block.body for alias in found.names if alias.asname == alias.name}
    beside = {point.name: point.module for point in entry_points(group="palestra.names")}
    assert sorted(beside) == sorted(palestra._BESIDE)
    assert seen == palestra._HOMES | beside


@pytest.mark.parametrize("name", sorted(palestra.__all__))
def test_every_exported_name_is_there_and_is_the_one_of_its_home(name):
    assert getattr(palestra, name).__name__ == name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Clinet'"):
        palestra.Clinet  # noqa: B018


BLOCKS = re.compile(
    r"wait\w*|sleep|request|stream|exchange|result|join|acquire|open|read\w*|write\w*|recv\w*|run|run_\w+"
)


def blocking_calls(tree: ast.AST) -> list[str]:
    """What the properties of a module call that may wait: for a server, a thread, a lock or a file."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        if not any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list):
            continue
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            joins_text = name == "join" and isinstance(call.func, ast.Attribute) and call.args
            if BLOCKS.fullmatch(name) and not joins_text:
                found.append(f"{node.name}: {ast.unparse(call)}")
    return found


@pytest.mark.slow
def test_no_property_waits_for_anything():
    assert blocking_calls(ast.parse("class J:\n @property\n def url(self):\n  return self.wait_for_server().url"))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {path: blocking_calls(ast.parse(path.read_text())) for path in files}
    assert {str(path): calls for path, calls in found.items() if calls} == {}


PAGES = [*(ROOT / "recipes").glob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_and_pages_import_from_the_top(page):
    """`palestra.errors` has all errors, in one place of its own."""
    imported = re.findall(r"^\s*(?:from|import) (palestra\.[\w.]+)", page.read_text(), re.MULTILINE)
    assert set(imported) <= {"palestra.errors"}


def test_no_class_is_told_by_a_protocol_at_run_time():
    """From Python 3.12 on, `isinstance` with a protocol does not see what an object has by `__getattr__`."""
    folders = [*(ROOT / package for package in PACKAGES), ROOT / "bench", ROOT / "recipes"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [str(path) for path in files if "runtime_checkable" in path.read_text()] == []


def test_a_checkout_knows_its_version_without_being_installed():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == palestra.__version__
    files = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if 'version("palestra")' in path.read_text()
    ]
    assert files == []
