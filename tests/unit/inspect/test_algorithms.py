"""`palestra algorithms`: the list, and what it says of one."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from palestra.algorithms.registry import ALGORITHMS
from palestra.cli.main import main
from palestra.config import parse_config


def test_all_are_listed_with_what_is_special_about_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["algorithms"]) == 0
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 80
    unwrapped = " ".join(listed.split())
    for name, algorithm in ALGORITHMS.items():
        assert f"{name} {algorithm.about.summary}" in unwrapped


def shown_default(field) -> str:
    default = field.default
    return "none" if default is None else f'"{default}"' if isinstance(default, str) else str(default).lower()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_is_shown_with_formula_paper_needs_and_every_setting_with_its_default(name, capsys):
    assert main(["algorithms", name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    about = ALGORITHMS[name].about
    for text in (about.formula, about.paper, *about.needs):
        assert " ".join(text.split()) in shown
    assert ("kl = none" in shown) == (name != "dpo"), "pairs need a reference"
    assert ('kl.estimator = "k3"' in shown) == (name not in ("sac", "reward_model"))
    settings = type(parse_config({"algorithm": {"name": name}}).algorithm).model_fields
    for key, field in settings.items():
        if isinstance(field.default, BaseModel):  # a table of its own
            for inner, of_inner in type(field.default).model_fields.items():
                value = "" if isinstance(of_inner.default, BaseModel) else shown_default(of_inner)
                assert f"{key}.{inner} = {value}" in shown or f"{key}.{inner}.learning_rate = " in shown
        elif key != "name":
            assert f"{key} = {shown_default(field)} {' '.join(field.description.split())}" in shown


def test_an_unknown_one_is_named_with_the_nearest(capsys):
    assert main(["algorithms", "gpro"]) == 2
    assert "did you mean 'grpo'? (known: grpo, dr_grpo, dapo" in capsys.readouterr().err
