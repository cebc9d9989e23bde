"""What the console prints of names that a user has chosen."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

from palestra.config import JobConfig
from palestra.runtime.console import console_of
from palestra.trainer.checkpoint import BEST, write_weights_folder


def printed(config: JobConfig, work) -> str:
    out = io.StringIO()
    console = console_of(config, file=out)
    work(console)
    return out.getvalue()


def test_names_with_markup_are_printed_as_they_are():
    config = JobConfig(name="a", model="[red]m[/]", run_dir=Path("[/]"))

    def work(console):
        console.__enter__()
        console.__exit__(None, None, None)
        console.report("warning", {"text": "[/] :smile: [bold]x"})
        console.finished("completed", {"policy": Path("[blue]/step")})

    shown = printed(config, work)
    for text in ("[red]m[/]", "warning: [/] :smile: [bold]x", "[blue]/step", "[/]/curve.png"):
        assert text in shown


def test_the_model_that_was_trained_is_named():
    for algorithm, said in (
        ("dpo", "runs/step-000002  (load"),
        ("reward_model", "runs/step-000002/reward_model  (a reward model"),
    ):
        config = JobConfig.model_validate({"name": "a", "algorithm": {"name": algorithm}})
        shown = printed(config, lambda console: console.finished("completed", {"policy": Path("runs/step-000002")}))
        assert f"model:  {said}" in shown


def test_the_weights_that_validated_best_are_named_with_their_step(tmp_path):
    newest = tmp_path / "checkpoints" / "step-000030"

    def shown() -> str:
        config = JobConfig(name="a", run_dir=tmp_path)
        return printed(config, lambda console: console.finished("completed", {"policy": newest}))

    assert "best:" not in shown()
    write_weights_folder(newest.parent / BEST, 20, lambda folder: (folder / "w").write_text("20"), {})
    assert f"best:   {newest.parent / BEST}  after step 20; export and eval take it" in shown()


def test_commands_can_be_pasted_into_a_shell():
    folder = "my runs/it's $HOME; ls"
    shown = printed(JobConfig(name="a", run_dir=Path(folder)), lambda console: console.finished("completed", {}))
    commands = re.findall(r"palestra (?:dashboard|episodes|export) .*?(?=   )", shown)
    assert [shlex.split(command)[2] for command in commands] == [folder] * 3


def test_what_computes_is_a_line_and_a_reason_a_warning():
    data = {"text": "computes on p, torch's operators, torch 2", "problem": "there is no C compiler (cc)"}
    for kind in ("training", "inference"):
        shown = printed(JobConfig(name="a", kind=kind), lambda console: console.report("numerics", data))
        assert "computes on p" in shown
        assert "warning: layers are computed without compiled functions" in shown
        assert "there is no C compiler (cc)" in shown


def test_a_step_of_pairs_says_how_many_were_right_and_no_reward():
    row = {"step": 1.0, "train/reward_mean": 0.5, "train/pair_accuracy": 0.75, "time/step_seconds": 2.0}
    shown = printed(JobConfig(name="a", steps=3), lambda console: console.report("step", row))
    assert "step 1/3   pairs  75% right" in shown
    assert "reward" not in shown
