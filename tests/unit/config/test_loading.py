from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest

from palestra.config import UNSET, JobConfig, dump_config, dump_saved_config, load_config, parse_config
from palestra.config.loading import path_keys, read_tables, resolve_paths
from palestra.config.section import sections_of
from palestra.errors import ConfigError


def refused(data, **overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"setps": 3}, "config: unknown key 'setps'; did you mean 'steps'?"),
        ({"rollout": {"group_sise": 3}}, "config: unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (
            {"policies": {"p": {"samplin": {}}}},
            "config: unknown key 'policies.p.samplin'; did you mean 'sampling'?",
        ),
        (
            {"policies": {"p": {"sampling": {"temprature": 1}}}},
            "config: unknown key 'policies.p.sampling.temprature'; did you mean 'temperature'?",
        ),
        (
            {"checkpoint": {"zzz": 1}},
            "config: unknown key 'checkpoint.zzz'; known keys here: every_steps, keep, optimizer",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one_in_one_line(data, wanted):
    assert refused(data) == wanted


def test_an_unknown_key_in_a_table_that_is_no_section_is_one_line_too():
    assert "policies.p" in refused({"policies": {"p": 3}})


def test_a_wrong_value_is_named_in_one_line():
    assert refused({"steps": "many"}).startswith("config: steps: ")
    too_many = {"engine": {"python": "/python", "url": "http://a:1", "kind": "vllm"}}
    assert refused(too_many).startswith("config: engine: give python, an interpreter that has vLLM, or url")


def test_overrides_reach_nested_keys_and_win():
    config = parse_config({"steps": 3, "rollout": {"group_size": 5}}, {"rollout.group_size": 6, "seed": 9})
    assert (config.steps, config.rollout.group_size, config.seed) == (3, 6, 9)
    assert parse_config({}, {"policies.p.max_context": 77}).policies["p"].max_context == 77


def test_overrides_leave_the_mapping_alone():
    data = {"policies": {"p": {"sampling": {"max_tokens": 3}}}}
    parse_config(data, {"policies.p.sampling.max_tokens": 4})
    assert data == {"policies": {"p": {"sampling": {"max_tokens": 3}}}}


def test_an_override_below_a_value_is_one_line():
    assert "steps" in refused({"steps": 3}, **{"steps.x": 1})


def test_an_override_can_take_a_key_out_wherever_it_was_set():
    data = {
        "steps": 3,
        "tasks": {"train": "a.jsonl"},
        "algorithm": {"importance_sampling": "token-mask"},
        "policies": {"p": {"sampling": {"max_tokens": 7}}},
        "environment": {"settings": {"size": 3}},
    }
    keys = (
        "steps",
        "tasks.train",
        "algorithm.importance_sampling",
        "policies.p.sampling.max_tokens",
        "environment.settings.size",
    )
    config = parse_config(data, dict.fromkeys(keys, UNSET))
    assert config.model_dump(exclude={"policies"}) == parse_config({}).model_dump(exclude={"policies"})
    assert config.policies["p"] == parse_config({}).policies["policy"]
    assert parse_config({"tasks": {"train": "x"}}, {"tasks": UNSET}) == parse_config({})
    assert parse_config({}, {"rollout.max_claimed": UNSET}) == parse_config({})


@pytest.mark.parametrize(("key", "near"), [("stesp", "steps"), ("rollout.group_sise", "group_size")])
def test_taking_out_a_key_that_does_not_exist_is_a_mistake_too(key, near):
    assert f"did you mean '{near}'" in refused({}, **{key: UNSET})


def test_an_unknown_override_is_named():
    assert "did you mean 'steps'" in refused({}, stesp=3)


def test_a_file_is_read_and_its_task_files_are_relative_to_it(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('steps = 4\n[tasks]\ntrain = "a.jsonl"\nvalidation = "/b.jsonl"\n')
    config = load_config(path, {"seed": 2})
    assert (config.steps, config.seed) == (4, 2)
    assert config.tasks.train == tmp_path / "a.jsonl"
    assert config.tasks.validation == Path("/b.jsonl")


PATHS = """
run_dir = "runs/x"
model = "mine"
[policies.other]
model = "./other"
[policies.named]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
[policies.home]
model = "~/mine"
[engine]
kind = "vllm"
python = "venv/bin/python"
[environment.settings]
model = "mine"
"""


def test_all_paths_of_a_file_are_relative_to_it_and_names_stay(tmp_path, monkeypatch):
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "job.toml").write_text(PATHS)
    monkeypatch.chdir(tmp_path)
    data = read_tables(Path("jobs/job.toml"))
    assert data["run_dir"] == f"{tmp_path}/jobs/runs/x"
    assert data["model"] == f"{tmp_path}/jobs/mine"
    assert data["policies"]["other"]["model"] == f"{tmp_path}/jobs/other"
    assert data["policies"]["named"]["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert data["policies"]["home"]["model"] == str(Path.home() / "mine")
    assert data["engine"]["python"] == f"{tmp_path}/jobs/venv/bin/python"
    assert data["environment"]["settings"]["model"] == "mine"


def test_a_path_of_an_override_is_relative_to_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text('run_dir = "x"')
    monkeypatch.chdir(tmp_path)
    assert load_config("jobs/job.toml", {"run_dir": "y"}).run_dir == Path("y")


def test_a_saved_configuration_says_the_same_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = JobConfig.model_validate({"run_dir": "runs/x", "model": "mine", "tasks": {"train": "a.jsonl"}})
    path = tmp_path / "config.toml"
    path.write_text(dump_saved_config(config))
    monkeypatch.chdir("/")
    assert load_config(tmp_path) == load_config(path)  # the folder of a run stands for its configuration
    found = load_config(path)
    assert (found.run_dir, found.tasks.train) == (tmp_path / "runs/x", tmp_path / "a.jsonl")
    assert found.digest() == config.digest()


def test_every_path_of_the_configuration_is_known_to_be_one():
    def paths(section, seen):
        for name, field in section.model_fields.items():
            if Path in (field.annotation, *get_args(field.annotation)) or "Interpreter" in str(field.annotation):
                yield name
        for field in section.model_fields.values():
            for other in sections_of(field.annotation):
                if other not in seen:
                    seen.add(other)
                    yield from paths(other, seen)

    assert set(paths(JobConfig, set())) - {"from_run"} <= path_keys()


def test_the_archive_of_an_image_is_relative_to_the_file_and_its_name_is_not_a_path(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[harness]\nname = "pi"\nsandbox = {image = "boxes/agent.tar.gz"}\n')
    harness = load_config(path).harness
    assert harness is not None
    assert harness.sandbox is not None
    assert harness.sandbox.image == str(tmp_path / "boxes/agent.tar.gz")
    (tmp_path / "agents").mkdir()
    table = {"harness": {"sandbox": {"image": "agents"}}}
    resolve_paths(table, tmp_path)
    assert table == {"harness": {"sandbox": {"image": "agents"}}}


@pytest.mark.parametrize("key", sorted(path_keys() | {"model", "from_run", "reference"}))
@pytest.mark.parametrize(
    ("value", "wanted"), [("there", "{}/there"), ("~/there", "{home}/there"), ("/there", "/there")]
)
def test_every_key_that_can_be_a_path_is_relative_to_the_file(tmp_path, key, value, wanted):
    (tmp_path / "there").mkdir()
    table = {"section": {key: value}}
    resolve_paths(table, tmp_path)
    assert table["section"][key] == wanted.format(tmp_path, home=Path.home())


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"steps = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"setps = 1", "did you mean 'steps'"),
        (b"tasks = 3", "tasks"),
    ],
)
def test_a_bad_file_is_one_line_with_its_path(tmp_path, content, wanted):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no such"):
        load_config(tmp_path / "none.toml")


def test_a_folder_instead_of_a_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_config(tmp_path)


def test_defaults_are_written_out():
    text = dump_config(JobConfig())
    assert tomllib.loads(text)["policies"]["policy"]["optimizer"]["learning_rate"] == 2e-5
    assert parse_config(tomllib.loads(text)) == JobConfig()
