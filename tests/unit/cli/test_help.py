"""What every command says of itself: defaults, units, an example that can be run; and what it says of mistakes."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.cli.main import main, parser
from palestra.cli.options import commands_of
from palestra_control.wire import LimitsBody
from palestra_service.commands.accounts import LIMITS

pytestmark = pytest.mark.ci

COMMANDS = sorted(commands_of(parser()))
UNITS = {
    "STEPS",
    "STEP",
    "EPISODES",
    "PROCESSES",
    "SESSIONS",
    "JOBS",
    "CORES",
    "CPUS",
    "GPUS",
    "GIB",
    "SECONDS",
    "DAYS",
    "TIME",
    "GAMES",
    "MODELS",
    "POLICIES",
    "ADAPTERS",
    "MONEY",
    "HOURS",
    "TOKENS",
}
COUNTED = {
    ("base", "--port"),
    ("base", "--tinker-port"),
    ("dashboard", "--port"),
    ("demo", "--seed"),
    ("env", "--port"),
    ("matrix", "--seed"),
    ("serve", "--port"),
    ("tenants", "--weight"),
    ("tinker", "--port"),
}  # numbers without a unit


def options_of(name: str) -> list[argparse.Action]:
    return [action for action in commands_of(parser())[name]._actions if action.help is not argparse.SUPPRESS]


def help_of(name: str, columns: int, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return commands_of(parser())[name].format_help()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_described_and_its_default_shown(name, monkeypatch):
    text = " ".join(help_of(name, 120, monkeypatch).split())
    for action in options_of(name):
        shown = action.option_strings[-1] if action.option_strings else action.dest
        assert action.help, shown
        if action.nargs == 0 or (action.required and action.option_strings) or action.dest == "help":
            continue
        if not action.option_strings and action.nargs not in ("?", "*"):
            continue  # it has to be given
        default = action.default not in (None, "", [], argparse.SUPPRESS) and f"(default: {action.default})"
        said = ("without", "may be given several times", "default", "after `")
        assert (default and default in text) or any(word in action.help.lower() for word in said), shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_has_a_unit(name):
    for action in options_of(name):
        number = action.type in (int, float) or getattr(action.type, "__name__", "") in ("time_span", "_amount")
        if number and (name, action.option_strings[-1]) not in COUNTED:
            assert action.metavar in UNITS, action.option_strings


@pytest.mark.parametrize("name", COMMANDS)
def test_its_examples_are_arguments_that_it_takes(name):
    known = parser()
    epilog = commands_of(known)[name].epilog or ""
    examples = [line.strip() for line in epilog.splitlines() if line.startswith(f"  palestra {name}")]
    assert examples
    for line in examples:
        words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
        parsed = known.parse_args(words)
        assert callable(parsed.run)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_it_fits_into_a_terminal(name, columns, monkeypatch):
    text = help_of(name, columns, monkeypatch)
    options = text.partition("\nexample:")[0]
    assert max(map(len, options.splitlines())) < columns
    assert max(map(len, text.splitlines())) <= 120  # examples are to be copied, and are not broken


def test_the_list_of_commands_has_each_beside_what_it_does(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser().format_help()
    for name in COMMANDS:
        assert re.search(rf"^    {name}  +\w", text, re.MULTILINE), name
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "job.toml", "--resmue"], "palestra run: there is no option --resmue; did you mean --resume?"),
        (
            ["train", "job.toml", "--task", "a.jsonl"],
            "palestra train: there is no option --task; did you mean --tasks?",
        ),
        (["run", "job.toml", "--res"], "palestra run: there is no option --res; did you mean --resume?"),
        (["run", "job.toml", "--xyzzy=3"], "palestra run: there is no option --xyzzy; see"),
        (["worker", "a:b", "c"], "palestra worker: 'c' is one argument too many"),
        (["tenants", "lst"], "did you mean list?"),
        (["completion", "xyzzy"], "there are bash, zsh, fish"),
        (["submit", "job.toml", "--priority", "hihg"], "did you mean high?"),
        (["run"], "palestra run: the following arguments are required: JOB.TOML"),
        (["demo", "--steps", "many"], "palestra demo: argument --steps: invalid int value: 'many'"),
        (["runn", "job.toml"], "palestra: there is no command 'runn'; did you mean `palestra run`?"),
        (["status"], "there is no command 'status'; did you mean `palestra top`?"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(words, said, capsys):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    out, line = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in line
    assert line.count("\n") == 1


def test_the_limits_that_the_help_of_keys_names_are_those_of_the_service():
    assert set(LIMITS) == set(LimitsBody.model_fields)


def test_help_is_quick_because_it_loads_none_of_what_commands_need():
    heavy = [
        "palestra.config",
        "palestra.client",
        "palestra.envs",
        "pydantic",
        "httpx2",
        "numpy",
        "torch",
        "shtab",
        "asyncio",
    ]
    script = f"import sys; from palestra.cli.main import parser; parser(); print(*set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


COMPLETE = """
source {script}
compopt() {{ :; }}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
_shtab_palestra
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("palestra ru", ["run"]),
        ("palestra ro", ["rotate-key"]),
        ("palestra run --re", ["--resume"]),
        ("palestra submit --mem", ["--memory-gib"]),
        ("palestra completion z", ["zsh"]),
        ("palestra submit --priority no", ["normal"]),
        ("palestra run jo", ["job.toml"]),
    ],
)
def test_bash_completes_commands_options_choices_and_files(tmp_path, capsys, words, wanted):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "job.toml").touch()
    lines = COMPLETE.format(script="./script", words=words)
    done = subprocess.run(["bash", "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [word.strip() for word in done.stdout.splitlines()] == wanted


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef palestra"), ("fish", "complete -c palestra")])
def test_there_are_scripts_for_other_shells(shell, mark, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert mark in text
    assert "rotate-key" in text
    assert "resume" in text
    assert str(Path.home()) not in text
