"""The model of `palestra harness check`: what it replies to prompts with the tools that coding agents offer."""

from __future__ import annotations

import json
import re

import pytest

from palestra_harness import known_harnesses
from palestra_harness.scripted import COMMAND, DONE, FILE, reply_to


def prompt(*tools: dict, turns: int = 0) -> str:
    lines = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in tools)
    listed = f"<tools>\n{lines}\n</tools>" if tools else "You name conversations."
    answered = "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
    return f"<|im_start|>system\n{listed}<|im_end|>\n{answered * turns}<|im_start|>assistant\n"


def tool(name: str, required: tuple[str, ...] = (), **properties: dict) -> dict:
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(required)}}


TEXT, LIST = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
READ = tool("read", ("path",), path=TEXT)


def called(text: str) -> tuple[str, dict]:
    found = json.loads(re.search(r"<tool_call>\n(.*)\n</tool_call>", text)[1])
    return found["name"], found["arguments"]


@pytest.mark.parametrize(
    ("tools", "name", "arguments"),
    [
        ([READ, tool("Bash", command=TEXT)], "Bash", {"command": COMMAND}),
        ([tool("shell", command=LIST)], "shell", {"command": ["bash", "-c", COMMAND]}),
        ([tool("write", filePath=TEXT, content=TEXT)], "write", {"filePath": FILE, "content": "palestra\n"}),
        (
            [
                tool(
                    "run",
                    ("cmd", "wait", "mode", "why"),
                    cmd=TEXT,
                    wait={"type": "boolean"},
                    mode={"enum": ["a"]},
                    why=TEXT,
                )
            ],
            "run",
            {"cmd": COMMAND, "wait": False, "mode": "a", "why": "write the file"},
        ),
    ],
)
def test_a_tool_that_runs_commands_or_writes_files_is_called_once(tools, name, arguments):
    assert called(reply_to(prompt(*tools), ())) == (name, arguments)
    assert reply_to(prompt(*tools, turns=1), ()) == DONE


@pytest.mark.parametrize("tools", [[], [READ]])
def test_nothing_is_called_where_no_tool_writes(tools):
    assert reply_to(prompt(*tools), ()) == DONE


def test_the_replies_of_a_script_follow_one_another():
    script = ("The first.\n", "The second.\n")
    assert [reply_to(prompt(READ, turns=turns), script) for turns in range(3)] == [*script, DONE]


def test_replies_that_a_program_shows_the_model_as_examples_are_no_turns():
    said = [
        ("assistant", "An example."),
        ("user", "Write it."),
        ("assistant", "The first."),
        ("assistant", "The second."),
    ]
    script = ("The first.\n", "The second.\n")
    for turn, expected in enumerate((*script, DONE)):
        shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said[: 2 + turn])
        assert reply_to(f"{shown}<|im_start|>assistant\n", script) == expected


def test_scripts_of_the_harnesses_write_the_file():
    scripts = [harness.script for harness in known_harnesses().values() if harness.script]
    assert scripts
    for first, *_ in scripts:
        assert FILE in first
        assert "palestra" in first.replace(FILE, "")
