"""The catalogue: every entry keeps to what environments have to do, and its tasks to what tasks have to be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from palestra.envs import CATALOG, Environment, catalog_entry
from palestra.errors import ConfigError
from palestra_inspect.environment_check import check_environment

pytestmark = pytest.mark.ci

NAMES = [
    *("arithmetic", "calculator", "subagents", "gomoku", "gomoku-duel", "kuhn-poker", "leduc-poker"),
    *("prisoners-dilemma", "negotiation", "open-spiel", "frozen-lake", "countdown", "gsm-symbolic"),
]
WITH_LIBRARIES = ["pettingzoo", "textarena"]  # played in tests/libraries
WITH_PROGRAMS = ["miniwob", "terminal", "desktop", "retrieval"]  # played in tests of their own
OF_FOLDERS = ["harbor"]  # whose tasks are few


def test_these_environments_ship():
    others = {*WITH_LIBRARIES, *WITH_PROGRAMS, *OF_FOLDERS}
    assert sorted(name for name in CATALOG if name not in others) == sorted(NAMES)
    assert others < {*CATALOG}
    assert all(entry.summary and "\n" not in entry.summary for entry in CATALOG.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_ships_keeps_to_what_environments_have_to_do(name):
    entry = catalog_entry(name)
    check_environment(entry.make, [*entry.generate("train", 2, 1), *entry.generate("validation", 1, 1)])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "countdown" else [])  # looks for what can be reached
        for name in (*NAMES, *WITH_PROGRAMS)
    ],
)
def test_tasks_are_json_distinct_the_same_for_the_same_seed_and_of_one_split(name):
    generate = catalog_entry(name).generate
    count = 12 if name == "countdown" else 150
    train, validation, other = (
        generate("train", count, 3),
        generate("validation", count // 3, 3),
        generate("train", count, 4),
    )
    assert len({task["id"] for task in train}) == count
    assert len({task["id"] for task in validation}) == count // 3
    assert not {task["id"] for task in (*train, *other)} & {task["id"] for task in validation}
    assert train == generate("train", count, 3) != other
    assert json.loads(json.dumps([*train, *validation])) == [*train, *validation]


@pytest.mark.slow
def test_tasks_do_not_depend_on_the_process():
    names = ("calculator", "gomoku")
    code = f"from palestra.envs import CATALOG; print([CATALOG[n].generate('train', 3, 9) for n in {names}])"
    command = [sys.executable, "-c", code]
    runs = {subprocess.check_output(command, text=True, env={"PYTHONHASHSEED": number}) for number in ("1", "2")}
    assert runs == {f"{[CATALOG[n].generate('train', 3, 9) for n in names]}\n"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["countdown", "gsm-symbolic"])
def test_the_splits_share_no_question(name):
    entry = catalog_entry(name)

    def questions(split, count):
        environment = entry.make()
        return {environment.reset(task)[0] for task in entry.generate(split, count, 5)}

    train, validation = questions("train", 12), questions("validation", 4)
    assert (len(train), len(validation), train & validation) == (12, 4, set())


def test_no_question_comes_twice_where_a_data_set_repeats_itself():
    """Of 1,500 seeds of gsm_symbolic in a row, several make the same question."""
    entry = catalog_entry("gsm-symbolic")
    environment = entry.make()
    assert len({environment.reset(task)[0] for task in entry.generate("train", 1500, 1)}) == 1500


def test_more_tasks_than_there_are_can_not_be_had():
    with pytest.raises(ConfigError, match=r"validation.*5000"):
        catalog_entry("arithmetic").generate("validation", 5000, 1)
    with pytest.raises(ConfigError, match="no 'test'"):
        catalog_entry("arithmetic").generate("test", 5, 1)


def test_a_name_that_is_not_known_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'frozen_lake'.*'frozen-lake'"):
        catalog_entry("frozen_lake")
    with pytest.raises(ConfigError, match=r"'zzz'.*arithmetic"):
        catalog_entry("zzz")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("arithmetic", {"sistem": "x"}, r"'sistem'.*known"),
        ("calculator", {"max_steps": "3"}, "'max_steps'.*valid integer"),
        ("calculator", {"max_steps": 0}, r"max_steps is.*1"),
        ("calculator", {"used_tool_reward": float("nan")}, "'used_tool_reward'.*finite"),
        ("calculator", {"clock": None}, "'clock'"),
        ("subagents", {"results": "later"}, r"'results'.*'together'.*'each'"),
        ("gomoku", {"size": 1}, "be played"),
        ("frozen-lake", {"is_slippery": "yes"}, "'is_slippery'"),
        ("countdown", {"max_value": 3}, "'max_value'"),
    ],
)
def test_a_wrong_setting_is_named(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        catalog_entry(name).make(**settings)


def test_settings_come_to_the_environment():
    environment = catalog_entry("gomoku").make(size=5, to_win=4)
    assert isinstance(environment, Environment)
    assert "4 in a row win" in environment.reset({"seed": 1})[0]
    assert catalog_entry("arithmetic").make(system="Add.").system == "Add."
    assert catalog_entry("calculator").make(max_steps=2).max_steps == 2


def test_maps_of_frozen_lake_come_with_the_task():
    entry = catalog_entry("frozen-lake")
    lake = entry.make()
    for task in entry.generate("validation", 3, 7):
        rows = lake.reset(task)[0].split("\n")[1:]
        assert rows == ["@" + task["map"][0][1:], *task["map"][1:]]
    assert lake.reset({})[0].split("\n")[1:] == ["@FFF", "FHFH", "FFFH", "HFFG"]
    lake.reset({"map": ["SG"]})
    assert lake.step("right")[1:3] == (1.0, True)
    for wrong in (["SF", "G"], ["SX"], "SG", [], ["FG"], ["SF"]):
        with pytest.raises(ValueError, match=r"map.*list"):
            lake.reset({"map": wrong})
