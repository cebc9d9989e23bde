"""Check the stops of a token's way in docs/explanation/architecture.md, and count its functions.

`python scripts/token_path.py` starts a job with a random tiny model, has two episodes make one unstreamed call each,
and trains one step on them. Each function that the table "The stops" names has to run. The script prints how many
functions and files the way has, and how many others run below its entries: helpers such as checks of sizes, keys,
clocks and counters. Properties, pydantic's validators, lambdas and comprehensions do not count. `--all` names the
helpers.
"""

import argparse
import inspect
import json
import re
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from types import CodeType, FrameType

import palestra

ROOT = Path(palestra.__file__).parent
PAGE = ROOT.parent / "docs" / "explanation" / "architecture.md"
# Functions at which the watched ways begin; the first three also serve other requests, and count during a call only.
DURING_A_CALL = ("RequestGuard.__call__", "EngineCore.step", "Writer._commit")
ENTRIES = (
    *DURING_A_CALL,
    "EmbeddedEngine.generate",
    "add_episode_routes.<locals>.end_episode",
    "Episodes.end",
    "complete",
    "Learner._manifest",
    "PolicyUpdate.make_batch",
    "make_batch",
    "PolicyUpdate.train",
    "TorchPolicy.gradient_pieces",
    "Pieces.run",
    "TorchPolicy.optim_step",
    "Learner._publish",
)
GOAL_FUNCTIONS, GOAL_FILES = 120, 49  # docs/explanation/architecture.md says why it is not 35 files
seen: dict[CodeType, None] = {}
calling = threading.Event()


def watch(frame: FrameType, event: str, _argument: object) -> None:
    """Note a function of the package that runs below the entry of a stop."""
    if event != "call" or not frame.f_code.co_filename.startswith(str(ROOT)):
        return
    above: FrameType | None = frame
    while above is not None:
        name = above.f_code.co_qualname
        if name in ENTRIES and above.f_code.co_filename.startswith(str(ROOT)):
            if calling.is_set() or name not in DURING_A_CALL:
                seen.setdefault(frame.f_code)
            return
        above = above.f_back


def left_out() -> set[CodeType]:
    """Return the code of properties and of pydantic's validators in all loaded modules of the package."""
    found: set[CodeType] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("palestra"):
            continue
        for _, kind in inspect.getmembers(module, inspect.isclass):
            for member in vars(kind).values():
                if isinstance(member, property) and member.fget is not None:
                    found.add(member.fget.__code__)
            decorators = getattr(kind, "__pydantic_decorators__", None)
            for group in ("field_validators", "model_validators", "field_serializers", "validators", "root_validators"):
                for decorator in getattr(decorators, group, {}).values():
                    wrapped = getattr(decorator.func, "__func__", decorator.func)
                    found.add(wrapped.__code__)
    return found


def rollout(task: dict[str, str], endpoint: palestra.ModelEndpoint) -> float:
    """Make one call over plain HTTP, and return a reward that differs between the two episodes of the group."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task["prompt"]}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"},
    )
    calling.set()
    with urllib.request.urlopen(request) as answer:
        json.load(answer)
    calling.clear()
    rewards.append(len(rewards))
    return float(rewards[-1])


rewards: list[int] = []  # each episode gets another one, so that the group has something to learn from


def stops() -> dict[str, list[str]]:
    """Return the functions of each stop, by qualified name, as docs/explanation/architecture.md has them."""
    table = PAGE.read_text().split("### The stops", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| (\d+ [^|]+) \|(.*)\|$", table, flags=re.MULTILINE)
    return {stop: re.findall(r"`([\w.<>]+)`", functions) for stop, functions in rows}


def train_watched() -> None:
    """Train one step of a tiny job, and note the functions that run."""
    with tempfile.TemporaryDirectory() as folder:
        config = palestra.JobConfig.model_validate(
            {
                "model": "tiny-random",
                "steps": 1,
                "run_dir": folder,
                "rollout": {"groups_per_step": 1, "group_size": 2},
                "policies": {"policy": {"sampling": {"max_tokens": 4}}},
            }
        )
        threading.setprofile(watch)
        palestra.train(rollout, [{"prompt": "hello"}], config, quiet=True, concurrency=1)
        threading.setprofile(None)


def main() -> int:
    """Train under watch, print the counts, and return 1 where the page names what did not run or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="name the functions beside the way, too")
    arguments = parser.parse_args()
    train_watched()
    ignored = left_out()
    functions = [c for c in seen if c not in ignored and not c.co_name.startswith("<")]
    ran = {c.co_qualname: c for c in functions} | {f"{Path(c.co_filename).stem}.{c.co_qualname}": c for c in functions}
    way: dict[str, CodeType] = {}
    missing: list[str] = []
    for stop, names in stops().items():
        found = {name: ran[name] for name in names if name in ran}
        missing += [name for name in names if name not in ran]
        way |= found
        print(f"{stop:<20}{len(found):>4} functions in {len({c.co_filename for c in found.values()}):>2} files")
    for name in missing:
        print(f"MISSED {name} is in the table and did not run")
    files = {code.co_filename for code in way.values()}
    met = not missing and len(way) <= GOAL_FUNCTIONS and len(files) <= GOAL_FILES
    goal = f"at most {GOAL_FUNCTIONS} in {GOAL_FILES}"
    print(f"{'met   ' if met else 'MISSED'} {len(way)} functions in {len(files)} files are the way ({goal})")
    beside = [code for code in functions if code not in way.values()]
    print(f"       {len(beside)} functions run beside it, in {len({c.co_filename for c in beside})} files")
    if arguments.all:
        for code in beside:
            print(f"       {Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
