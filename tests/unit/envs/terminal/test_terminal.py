"""The terminal as an environment: commands, keys, tasks of all kinds, right and wrong, and what breaks from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest
from machine import require

from palestra.envs import catalog_entry
from palestra.errors import EnvironmentFailed
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall, text_message
from palestra_inspect.environment_check import check_environment
from palestra_screens import TerminalEnvironment
from palestra_screens.terminal import shell
from palestra_screens.terminal.tasks import KINDS, terminal_tasks

pytestmark = pytest.mark.ci

require("bwrap", "git")
TASK = {"id": "t", "kind": "count", "prompt": "Count.", "files": {"a": "1\n"}, "begin": "", "expected": "7"}


def one_of(kind: str) -> dict:
    return next(task for task in terminal_tasks("train", 40, 1) if task["kind"] == kind)


def said(text: str) -> ChatMessage:
    return text_message("assistant", text)


def calls(*asked: tuple[str, dict]) -> ChatMessage:
    made = tuple(
        ToolCall(id=f"c{number}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for number, (name, arguments) in enumerate(asked)
    )
    return ChatMessage(role="assistant", content=(), tool_calls=made)


@pytest.fixture
async def terminal():
    environment = TerminalEnvironment(actions="text", max_steps=8, command_seconds=5)
    yield environment
    await environment.close()


async def output(environment: TerminalEnvironment, command: str) -> str:
    messages, *_ = await environment.step_message(said(f"run {command}"))
    return messages[-1].text if messages else ""


SOLUTIONS = {
    "find": lambda task: (f"grep -rl {task['prompt'].split(' word ')[1].split('.')[0]} notes", task["expected"]),
    "count": lambda task: ("wc -l events.log", task["expected"]),
    "edit": lambda task: (
        "sed -i 's/^{1} = .*/{1} = {3}/' settings.ini".format(
            *task["prompt"].split(),
            "",
        ),
        "done",
    ),
    "git": lambda task: (
        "git checkout -qb {branch} && printf '{text}' > {file} && git add . && git commit -qm more".format(
            **{**task["expected"], "text": task["expected"]["text"].strip()}
        ),
        "done",
    ),
    "fix": lambda task: (
        "printf 'def {function}(a, b):\\n    return dict([{values}])[(a, b)]\\n' > {module}.py".format(
            **{
                **task["expected"],
                "values": ", ".join(
                    f"(({a}, {b}), {value})"
                    for (a, b), value in zip(task["expected"]["arguments"], task["expected"]["values"], strict=True)
                ),
            }
        ),
        "done",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_task_is_scored_by_what_was_done(terminal, kind):
    task = one_of(kind)
    command, answer = SOLUTIONS[kind](task)
    text, _ = await terminal.reset(task)
    assert text == task["prompt"]
    await output(terminal, command)
    assert (await terminal.step_message(said(f"finish {answer}")))[1:4] == (1.0, True, False)
    await terminal.reset(task)  # nothing of the solution is there any more
    wrong = "nothing" if kind in ("find", "count") else "done"
    assert (await terminal.step_message(said(f"finish {wrong}")))[1:4] == (0.0, True, False)


async def test_a_shell_keeps_its_folder_and_its_variables(terminal):
    await terminal.reset(TASK)
    assert await output(terminal, "mkdir b; cd b; X=3") == "done"
    assert await output(terminal, "pwd; echo $X; false") == "/work/b\n3\n(exit code 1)"
    assert await output(terminal, "echo 'open") == (
        "bash: unexpected EOF while looking for matching `''\n(exit code 2)"
    )
    assert await output(terminal, "printf '\\033[31mred\\033[0m'; printf '\\033]0;title\\007'") == "red"


@pytest.mark.slow
async def test_a_program_that_waits_for_keys_gets_them():
    environment = TerminalEnvironment(command_seconds=0.5)
    try:
        await environment.reset(TASK)
        messages, reward, over, _, _ = await environment.step_message(
            calls(
                ("run", {"command": "read x; echo got $x; cat"}), ("run", {"command": "ls"}), ("keys", {"keys": "hi\n"})
            )
        )
        assert [message.text for message in messages] == [
            "(still running)",
            "Error: bad arguments for run: the last command has not ended; send it keys, such as C-c.",
            "got hi\n(still running)",
        ]
        said = ""
        for _ in range(20):  # a busy machine may take longer than `command_seconds`
            (message,), reward, over, *_ = await environment.step_message(calls(("keys", {"keys": "C-c"})))
            said += message.text
            if "(exit code 130)" in said:
                break
        assert "(exit code 130)" in said
        (message,), *_ = await environment.step_message(calls(("run", {"command": "echo on"})))
        assert message.text.startswith("on")
        assert (reward, over) == (0.0, False)
    finally:
        await environment.close()


@pytest.mark.slow
async def test_a_hundred_megabytes_of_output_are_a_few_kilobytes_of_text(terminal):
    await terminal.reset(TASK)
    terminal._seconds = 60
    text = await output(terminal, "head -c 100000000 /dev/zero | tr '\\0' x; echo the end")
    assert len(text) < 10_000
    assert "bytes are left out" in text
    assert text.endswith("the end")


async def test_what_ends_the_shell_is_the_agents_own_doing(terminal):
    await terminal.reset(TASK)
    assert "the terminal has ended" in await output(terminal, "exit 3")
    assert "the terminal has ended" in await output(terminal, "ls")
    assert (await terminal.step_message(said("finish 7")))[1:3] == (1.0, True)


async def test_a_command_that_is_said_to_have_ended_keeps_no_one_waiting(terminal):
    """Any program in the sandbox can write to the pipe of exit codes, while the shell takes no commands."""
    await terminal.reset(TASK)
    false = "fd=${PROMPT_COMMAND##*&}; (while :; do echo 0 >&$fd; sleep 0.02; done) & sleep 60"
    terminal._seconds = 0.5
    await output(terminal, false)
    began = time.monotonic()
    texts = [await output(terminal, "\N{GRINNING FACE}" * 7900) for _ in range(4)]
    assert time.monotonic() - began < 5
    assert "the shell does not take commands any more" in texts[-1]


async def test_empty_lines_for_exit_codes_are_no_errors(terminal, caplog):
    await terminal.reset(TASK)
    await output(terminal, "fd=${PROMPT_COMMAND##*&}; for i in $(seq 100); do echo >&$fd; done; sleep 0.2")
    assert not caplog.records


HARMFUL = {
    "long names": "d=$(printf 'x%.0s' {1..200}); for i in {1..25}; do mkdir $d; cd $d; done; echo > f; cd /work",
    "holes": "truncate -s 55M hole; mkdir s; python3 -c \"for i in range(9000): open(f's/{i}', 'w').write('1')\"",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fix", "git"])
@pytest.mark.parametrize("harm", HARMFUL)
async def test_files_that_can_not_be_copied_for_the_check_solve_nothing(terminal, kind, harm):
    await terminal.reset(one_of(kind))
    assert await output(terminal, HARMFUL[harm]) in ("", "done")
    assert (await terminal.step_message(said("finish done")))[1:3] == (0.0, True)


async def test_what_kills_the_sandbox_from_outside_is_a_failure(terminal):
    await terminal.reset(TASK)
    shell = terminal._opened()
    os.kill(shell.sandbox.process.pid, signal.SIGKILL)
    await shell.sandbox.process.wait()
    with pytest.raises(EnvironmentFailed, match=r"signal.*9"):
        await terminal.step_message(said("run ls"))
    await terminal.reset(TASK)  # played again
    assert await output(terminal, "cat a") == "1"


async def test_an_episode_that_is_cut_off_is_scored_as_it_was_left():
    task = one_of("edit")
    environment = TerminalEnvironment(actions="text", max_steps=2)
    try:
        await environment.reset(task)
        assert (await environment.step_message(said("run ls")))[1:4] == (0.0, False, False)
        assert (await environment.step_message(said(f"run {SOLUTIONS['edit'](task)[0]}")))[1:4] == (1.0, False, True)
    finally:
        await environment.close()


async def test_what_is_no_action_is_said(terminal):
    await terminal.reset(TASK)
    messages, reward, over, _, _ = await terminal.step_message(said("Let me think."))
    assert (messages[0].text, reward, over) == ("That is no action: reply with one line.", 0.0, False)
    assert "run COMMAND: Run a command in the shell." in str(terminal.system)


@pytest.mark.slow
def test_the_terminal_keeps_to_what_environments_have_to_do():
    entry = catalog_entry("terminal")
    check_environment(entry.make, entry.generate("train", 1, 1))


FLOODS = {
    "long lines": "yes $(head -c 3000 /dev/zero | tr '\\0' A)",
    "one endless line": "yes | tr -d '\\n'",
    "zeros": "cat /dev/zero",
    "a fork that keeps the terminal": "(trap '' HUP; setsid yes &) ; sleep 60",
    "false exit codes": "fd=${PROMPT_COMMAND##*&}; yes 1 >&$fd",
    "no signal": "trap '' TERM INT HUP QUIT; while :; do sleep 0.01; done",
}


@pytest.mark.parametrize(
    "name", [name if name in ("long lines", "zeros") else pytest.param(name, marks=pytest.mark.slow) for name in FLOODS]
)
async def test_a_flood_of_output_ends_with_the_time_of_its_command(name):
    environment = TerminalEnvironment(actions="text", command_seconds=0.5)
    try:
        await environment.reset(TASK)
        began = time.monotonic()
        text = await output(environment, FLOODS[name])
        assert time.monotonic() - began < 5
        assert len(text) < 10_000
        used = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - used < 0.9, "what it goes on writing is not read for ever"
        began = time.monotonic()
        assert (await environment.step_message(said("finish 7")))[1:3] == (1.0, True)
        assert time.monotonic() - began < 5
    finally:
        await environment.close()


@pytest.mark.parametrize("name", ["long lines", pytest.param("false exit codes", marks=pytest.mark.slow)])
async def test_one_cancellation_ends_a_step_whose_output_never_pauses(name, monkeypatch):
    monkeypatch.setattr(shell, "_MAX_BYTES", 2**60)
    environment = TerminalEnvironment(actions="text", command_seconds=60)
    try:
        await environment.reset(TASK)
        step = asyncio.create_task(output(environment, FLOODS[name]))
        await asyncio.sleep(0.3)
        step.cancel()
        await asyncio.wait((step,), timeout=5)
        assert step.done()
    finally:
        await environment.close()


async def test_a_program_that_has_written_too_much_waits_for_the_next_action(monkeypatch):
    monkeypatch.setattr(shell, "_MAX_BYTES", 100_000)
    monkeypatch.setattr(shell, "_BETWEEN_BYTES", 0)
    environment = TerminalEnvironment(actions="tools", command_seconds=30)
    try:
        await environment.reset(TASK)
        (message,), *_ = await environment.step_message(calls(("run", {"command": "yes | head -c 250000; echo end"})))
        assert message.text.endswith("waits for the next keys)")
        for _ in range(20):
            (message,), *_ = await environment.step_message(calls(("keys", {"keys": "x"})))
            if message.text.endswith("end"):
                return
        raise AssertionError(message.text[-200:])
    finally:
        await environment.close()
