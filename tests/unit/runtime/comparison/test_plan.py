from __future__ import annotations

from pathlib import Path

import pytest

from palestra.errors import ConfigError
from palestra.extensions import load_function
from palestra_lab.comparison.execution import check_records
from palestra_lab.comparison.plan import plan_runs
from palestra_lab.config import ComparisonConfig, load_comparison
from unit.runtime.comparison.grids import GRID, finish, planned, rows, write_grid


def test_every_seed_of_every_scenario_and_algorithm_is_one_run_and_seeds_come_in_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    assert [(run.scenario, run.algorithm, run.seed) for run in runs] == [
        ("sums", "grpo", 3), ("sums", "flat", 3), ("sums", "grpo", 1), ("sums", "flat", 1),
    ]  # fmt: skip
    assert [run.config.seed for run in runs] == [3, 3, 1, 1]
    assert runs[1].folder == runs[1].config.run_dir == tmp_path / "out/sums/flat/seed-3"


def test_runs_of_a_scenario_differ_in_the_algorithm_and_its_overrides_only(tmp_path):
    _, runs = planned(tmp_path)
    first, second = (run.config.model_dump() for run in runs[:2])
    assert {key for key in first if first[key] != second[key]} == {"name", "run_dir", "algorithm", "rollout", "steps"}
    assert first["rollout"] | {"group_size": 2} == second["rollout"]
    assert first["algorithm"] | {"advantage_scale": "none"} == second["algorithm"]
    # The base job's algorithm and number of steps are of another run; its other keys hold.
    assert first["algorithm"]["name"] == "grpo"
    assert first["algorithm"]["clip_low"] == 0.2
    assert (first["token_budget"], first["evaluation"]["every_tokens"], first["checkpoint"]["keep"]) == (400, 100, 3)
    assert (first["steps"], second["steps"]) == (400 / 8, 400 / 4)  # an episode samples a token at least


def test_what_holds_in_one_scenario_only_is_of_that_scenario_only(tmp_path):
    more = """
[scenarios.other]
job = "job.toml"
token_budget = 100
threshold = 0.5
seeds = [9]
algorithms = ["flat"]
overrides.rollout.groups_per_step = 3
tuned.flat = { epochs = 2, overrides = { steps = 5, policies.policy.optimizer.learning_rate = 0.5 } }
"""
    _, runs = planned(tmp_path, GRID + more)
    other = [run.config for run in runs if run.scenario == "other"]
    assert [(config.seed, config.algorithm.epochs, config.steps) for config in other] == [(9, 2, 5)]
    assert other[0].rollout.groups_per_step == 3
    assert other[0].policies["policy"].optimizer.learning_rate == 0.5
    sums = [run.config for run in runs if run.scenario == "sums"]
    assert {(config.algorithm.epochs, config.rollout.groups_per_step) for config in sums} == {(1, 2)}


def test_a_function_says_what_is_played(tmp_path):
    (tmp_path / "recipe.py").write_text(
        "def scenario(n):\n"
        "    tasks = [{'prompt': str(i)} for i in range(n)]\n"
        "    return {'reward': lambda task, answer: 1.0, 'tasks': tasks, 'validation_tasks': tasks,\n"
        "            'config': {'model': 'tiny-random'}}\n"
    )
    grid = GRID.replace('job = "job.toml"', 'play = "recipe.py:scenario"\narguments = { n = 3 }')
    _, runs = planned(tmp_path, grid)
    assert runs[0].play == f"{tmp_path}/recipe.py:scenario"
    assert runs[0].arguments == {"n": 3}
    assert runs[0].config.policies["policy"].model == "tiny-random"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("threshold", "treshold", r"you.*'threshold'"),
        (
            "token_budget = 400",
            "token_budget = 0",
            r"scenarios.sums.token_budget",
        ),
        ("[algorithms.grpo]", "[algorithms.gpro]", r"gpro.*'gpro'"),
        ('advantage_scale = "none"', "advantage_scal = 1", r"'algorithm.advantage_scal'"),
        ("group_size = 2", "group_sice = 2", r"'rollout.group_sice'"),
        ("overrides.rollout.group_size = 2", "overrides.seed = 2", r"sets.*'seed'"),
        ("overrides.rollout.group_size = 2", "overrides.rollout.group_size = 1", "group_size"),
        ("[3, 1]", "[3, 3]", r"\[3.*3\]"),
        ("[3, 1]", "[]", r"seeds.*1"),
        ('job = "job.toml"', 'job = "jop.toml"', r"jop.toml"),
        ('job = "job.toml"', "", "base job"),
        ('job = "job.toml"', 'job = "job.toml"\narguments = { n = 3 }', r"`arguments`.*`play`"),
        ('job = "job.toml"', 'job = "job.toml"\nalgorithms = ["gpro"]', r"'gpro'.*flat"),
        ('job = "job.toml"', 'job = "job.toml"\ntuned.gpro.epochs = 2', r"'gpro'.*flat"),
        ('job = "job.toml"', 'job = "job.toml"\ntuned.grpo.name = "x"', "a `name`"),
        ('job = "job.toml"', 'job = "job.toml"\noverrides.environment.validation_tasks = 0', "no validation"),
        ('job = "job.toml"', 'play = "nothing.py:f"', r"nothing.py"),
        ('job = "job.toml"', 'play = "recipe.py:g"', "no 'g'"),
        ('job = "job.toml"', 'play = "recipe.py:f"\narguments = { n = 3 }', r"f\(\) got"),
        ('job = "job.toml"', 'play = "recipe.py:f"', "keys taks"),
        ('job = "job.toml"', 'play = "recipe.py:number"', "int; expected"),
        ('job = "job.toml"', 'play = "recipe.py:none"', r"returns.*`config`"),
        ('job = "job.toml"', 'job = "job.toml"\nplay = "recipe.py:both"', "one out"),
        ('job = "job.toml"', 'play = "recipe.py:boom"', r"recipe\.py:boom.*KeyError.*'x'"),
        ('job = "job.toml"', 'play = "recipe.py:leave"', r"recipe\.py:leave.*SystemExit.*0"),
        ('job = "job.toml"', 'play = "leaves.py:f"', r"leaves\.py:f.*SystemExit.*0"),
        ("[algorithms.grpo]", "[algorithms.grpo", r"valid.*TOML"),
    ],
)
def test_what_can_not_be_run_is_refused_with_the_place(tmp_path, old, new, said):
    (tmp_path / "recipe.py").write_text(
        "def f(): return {'taks': []}\ndef number(): return 3\ndef none(): return {}\n"
        "def both(): return {'config': {}, 'validation_tasks': [{}]}\n"
        "def boom(): raise KeyError('x')\ndef leave(): raise SystemExit(0)\n"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert old in GRID
    with pytest.raises(ConfigError, match=said) as refused:
        planned(tmp_path, GRID.replace(old, new))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml"):
        load_comparison(tmp_path / "none.toml")


def test_runs_that_were_made_with_other_settings_are_not_taken_for_these(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, runs = planned(tmp_path)
    finish(runs[0], rows((0, 0.1)))
    check_records(runs)
    for old, new, said in (
        ("token_budget = 400", "token_budget = 500", "config.steps"),
        ("evaluations = 4", "evaluations = 5", "config.evaluation.every_tokens"),
        ("[algorithms.grpo]", "[algorithms.grpo]\nepochs = 2", "config.algorithm.epochs"),
    ):
        _, changed = planned(tmp_path, GRID.replace(old, new))
        with pytest.raises(ConfigError, match=rf"out/sums/grpo/seed-3.*{said}.*choose"):
            check_records(changed)
    _, fewer = planned(tmp_path, GRID.replace("[algorithms.grpo]", "[algorithms.other]\nname = 'grpo'\n"))
    check_records(fewer)  # what is not in the plan is not looked at


def test_every_key_is_in_the_page_about_it():
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "compare.md").read_text()
    for section in (ComparisonConfig, *(ComparisonConfig.model_fields[name].annotation.__args__[1] for name in
                                        ("scenarios", "algorithms"))):  # fmt: skip
        for key in section.model_fields:
            assert f"`{key}`" in text, key


def test_the_grid_of_the_recipes_can_be_run():
    recipes = Path(__file__).parents[4] / "recipes"
    runs = plan_runs(load_comparison(recipes / "compare.toml"), load_function)
    assert len({run.algorithm for run in runs}) >= 8
    seeds = {key: {run.seed for run in runs if run.scenario == key} for key in {run.scenario for run in runs}}
    assert {key: len(of) for key, of in seeds.items()} == {
        "frozen-lake-4x4": 5,
        "frozen-lake-8x8": 5,
        "gomoku": 5,
        "addition": 3,
    }


def test_paths_are_relative_to_the_file(tmp_path):
    comparison = load_comparison(write_grid(tmp_path, GRID + '[scenarios.b]\nplay = "a/b.py:f"\n'
                                            "token_budget = 1\nthreshold = 1\n"))  # fmt: skip
    assert comparison.scenarios["sums"].job == tmp_path / "job.toml"
    assert comparison.scenarios["b"].play == f"{tmp_path}/a/b.py:f"


def test_finished_runs_are_the_same_from_every_folder_and_by_every_path(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a/recipe.py").write_text("def f(): return {'validation_tasks': [{}]}\n")
    (tmp_path / "a/t.jsonl").write_text('{"q": 1}\n')
    grid = GRID.replace('output = "out"', f'output = "{tmp_path}/out"')
    write_grid(tmp_path / "a", grid + '[scenarios.b]\nplay = "recipe.py:f"\njob = "job.toml"\ntoken_budget = 9\n'
                                      "threshold = 1\nalgorithms = ['grpo']\nseeds = [1]\n")  # fmt: skip
    (tmp_path / "a/job.toml").write_text('[tasks]\ntrain = "t.jsonl"\nvalidation = "t.jsonl"\n')
    monkeypatch.chdir(tmp_path / "a")
    for run in plan_runs(load_comparison(Path("compare.toml")), load_function):
        finish(run, rows((0, 0.1)))
    for folder, path in (("a", "compare.toml"), ("a", "../a/compare.toml"), ("a", f"{tmp_path}/link/compare.toml")):
        monkeypatch.chdir(tmp_path / folder)
        check_records(plan_runs(load_comparison(Path(path)), load_function))
    monkeypatch.chdir(tmp_path)
    others = [run for run in plan_runs(load_comparison(Path("a/compare.toml")), load_function) if run.scenario != "b"]
    check_records(others)
    (tmp_path / "other.jsonl").write_text('{"q": 2}\n')
    (tmp_path / "a/job.toml").write_text('[tasks]\ntrain = "../other.jsonl"\nvalidation = "t.jsonl"\n')
    with pytest.raises(ConfigError, match=r"config\.tasks\.train"):
        check_records(plan_runs(load_comparison(Path("a/compare.toml")), load_function))
