"""Folders of models that anybody may have made: no code of theirs runs, and what is wrong with them is one line."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

import palestra
from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra.models.loading import load_model, load_parted
from palestra.renderers import probes as template_text
from palestra.renderers import select_renderer

HERE = Path(palestra.__file__).parent


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(model_folder("tiny-random"), tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def cut(folder):
    file = weights_of(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def long_header(folder):
    file = weights_of(folder)
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a pickle ran')",)


def pickled(folder):
    weights_of(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def code(folder):
    (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})


DAMAGES = {
    "cut weights": cut,
    "a long header": long_header,
    "a pickle": pickled,
    "code": code,
    "a list": lambda folder: (folder / "config.json").write_text("[1]"),
    "half a tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("load", [load_model, load_parted])
def test_a_damaged_or_hostile_folder_is_one_line_and_no_code_runs(folder, name, load, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    DAMAGES[name](folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder), torch.float32, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_every_call_that_reads_a_folder_says_that_no_code_is_run():
    own = ("GenerationConfig", "PreTrainedTokenizerFast", "model_type)")  # these never run any
    seen = 0
    for path in HERE.parent.glob("palestra*/**/*.py"):
        source = re.sub(r"\s+", " ", path.read_text())
        for found in re.finditer(r"(\S+)\.from_(?:pretrained|config)\(((?:[^()]|\([^()]*\))*)\)", source):
            if found[1].startswith(("Auto", "(Auto")) and not found[1].endswith(own):
                seen += 1
                assert "**NO_" in found[2], (path.name, found[0])
    assert seen >= 10


@pytest.mark.parametrize(
    "template",
    [
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 1 // 0 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_with_a_defect_is_one_line_in_bounded_time(folder, template, monkeypatch):
    monkeypatch.setattr(template_text, "TEMPLATE_SECONDS", 0.3)
    _, tokenizer = load_model(str(folder), torch.float32, torch.device("cpu"))
    select_renderer(tokenizer)  # imports
    tokenizer.chat_template = template
    began = time.monotonic()
    with pytest.raises(ModelError, match="chat template"):
        select_renderer(tokenizer)
    assert time.monotonic() - began < 10
