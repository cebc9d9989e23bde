"""Servers of MCP over standard input and output: what they say, how they fail, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from palestra.agents import ToolAgent
from palestra.envs import ToolEnvironment
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, InvalidEnvironment, ProtocolMismatch
from palestra.pictures.pixels import decode_picture
from palestra.tools import ToolFailure, ToolManager
from palestra.types.messages import TextPart
from palestra_inspect.environment_check import check_environment
from palestra_mcp import McpServer
from palestra_worlds.subagents import SubagentEnvironment
from unit.tools.test_manager import call

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def server(fault: str = "", **settings) -> McpServer:
    return McpServer([sys.executable, "-I", "-S", SERVER, fault], **settings)


async def answers(manager: ToolManager, name: str, **arguments) -> str:
    (result,) = await manager.execute_calls([call(name, json.dumps(arguments))])
    return result.content


def running(needle: str) -> list[int]:
    """Processes, zombies not counted, whose command has this text."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if needle in (folder / "cmdline").read_text() and folder.name.isdecimal():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


async def gone(needle: str) -> bool:
    for _ in range(100):
        if not running(needle):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_tools_of_all_pages_are_offered_called_and_listed_anew_when_they_change():
    manager = ToolManager([server()])
    await manager.open()
    try:
        names = [schema["function"]["name"] for schema in manager.schemas]
        assert names == [
            "add",
            "parts",
            "show",
            "spoil",
            "fail",
            "hang",
            "die",
            "grow",
            "large",
            "flood",
            "environment",
        ]
        assert manager.schemas[0]["function"]["parameters"]["required"] == ["a"]
        assert await answers(manager, "add", a=2, b=3) == "5"
        assert await answers(manager, "add") == "Error: bad arguments for add: the argument 'a' is missing."
        assert await answers(manager, "fail") == "Error: fail failed: McpToolError: the disk is full"
        assert await answers(manager, "grow") == "grown"
        await manager.refresh()
        assert manager.schemas[-1]["function"]["name"] == "new"
        # The server has had an answer to its ping before the first call.
        seen = json.loads(await answers(manager, "new"))["seen"]
        assert seen[:2] == ["initialize", "answer"]
        assert seen[2] == "notifications/initialized"
    finally:
        await manager.close()
    assert manager.schemas == ()


async def test_what_is_no_text_is_said_in_words():
    manager = ToolManager([server()])
    await manager.open()
    shown = (await answers(manager, "parts")).split("\n\n")
    await manager.close()
    assert shown == [
        "seen",
        "[image of image/png, 3 bytes, which can't be shown]",
        "[resource a at file:///a]",
        "[resource file:///b]\nwords",
        "[resource file:///c of x/y, 2 bytes, which can't be shown]",
        "[a part of the kind 'hologram', which can't be shown]",
    ]


@pytest.mark.parametrize("shared", [False, True])
async def test_images_reach_a_model_that_sees_as_pictures_in_their_place(shared):
    manager = ToolManager([server(pictures=True, shared=shared)])
    await manager.open()
    (result,) = await manager.execute_calls([call("show", "{}")])
    (said,) = await manager.execute_calls([call("parts", "{}")])
    await manager.close()
    left_out = "[image of image/png, 3 bytes, which can't be shown]"
    kinds = [part.text if isinstance(part, TextPart) else decode_picture(part.data).size for part in result.parts]
    assert kinds == ["one\n\ntwo", (1, 1), (1, 1), left_out]
    assert result.message.content == result.parts
    assert result.content == f"one\n\ntwo\n{left_out}"
    assert (said.parts, said.content.count("can't be shown")) == ((), 3)


async def test_a_call_that_takes_too_long_is_cancelled_at_the_server():
    manager = ToolManager([server()], timeout_seconds=0.2)
    await manager.open()
    (result,) = await manager.execute_calls([call("hang")])
    assert result.failure is ToolFailure.TIMED_OUT
    await answers(manager, "grow")
    await manager.refresh()
    assert "notifications/cancelled" in json.loads(await answers(manager, "new"))["seen"]
    await manager.close()


async def test_chosen_tools_get_a_prefix_and_two_servers_may_not_clash():
    manager = ToolManager([server(tools=["add"]), server(tools=["add"], prefix="other_")])
    await manager.open()
    assert [schema["function"]["name"] for schema in manager.schemas] == ["add", "other_add"]
    assert await answers(manager, "other_add", a=4) == "4"
    await manager.close()
    with pytest.raises(ValueError, match=r"'add'.*`prefix`"):
        await ToolManager([server(tools=["add"]), server(tools=["add"])]).open()
    assert await gone(SERVER)


async def test_a_server_gets_no_variable_that_was_not_given_to_it(monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "key")
    manager = ToolManager([server(variables={"GIVEN": "yes"})])
    await manager.open()
    assert json.loads(await answers(manager, "environment")) == {"SECRET_OF_A_TEST": None, "GIVEN": "yes"}
    await manager.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        (server("old"), ProtocolMismatch, "speaks version '1999-01-01' of MCP, and this client 2025-11-25"),
        (server("without"), EnvironmentFailed, "offers no tools"),
        (server("dies"), EnvironmentFailed, "ended with code 1: no licence"),
        (server("chatty"), EnvironmentFailed, "writes to standard output what is no message of MCP: b'Welcome!"),
        (server("slow", start_seconds=0.3), EnvironmentFailed, "did not answer within 0.3 s"),
        (server("endless"), EnvironmentFailed, "or some page twice"),
        (server(tools=["divide"]), EnvironmentFailed, "has no tool 'divide'; it has add, parts"),
        (McpServer(["/no/such/program"]), EnvironmentFailed, "ended with code 127: /no/such/program: No such file"),
        (McpServer(["true"], folder="/no/folder"), EnvironmentFailed, "can't be started: No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_server_that_can_not_be_used_says_why_in_a_line(made, kind, words):
    with pytest.raises(kind) as refused:
        await ToolManager([made]).open()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("where", "settings", "words"),
    [
        ("python server.py", {}, r"URL.*MCP"),
        ("ftp://host/mcp", {}, r"URL.*MCP"),
        ([], {}, r"list.*words"),
        ("http://127.0.0.1:1/mcp", {"variables": {"A": "1"}}, "are of a command"),
        (["true"], {"headers": {"A": "1"}}, r"headers.*URL"),
        (["true"], {"start_seconds": 0.0}, "above 0"),
    ],
)
def test_wrong_settings_are_refused_at_once(where, settings, words):
    with pytest.raises(ConfigError, match=words):
        McpServer(where, **settings)


async def test_a_server_that_dies_fails_the_attempt_and_is_no_text_for_the_model():
    manager = ToolManager([server()])
    await manager.open()
    with pytest.raises(EpisodeForfeited, match=r"code.*3"):
        await manager.execute_calls([call("die"), call("hang")])
    with pytest.raises(EpisodeForfeited, match=r"code.*3"):
        await manager.execute_calls([call("add", '{"a": 1}')])
    await manager.close()


async def test_a_shared_server_that_dies_is_started_anew_but_not_for_ever():
    shared = server(shared=True, max_restarts=2)
    first, second = ToolManager([shared]), ToolManager([shared])
    await first.open()
    await second.open()
    assert len([pid for pid in running(SERVER) if "keeper" not in Path(f"/proc/{pid}/cmdline").read_text()]) == 1
    for _ in range(2):
        with pytest.raises(EpisodeForfeited):
            await first.execute_calls([call("die")])
        assert await answers(second, "add", a=1) == "1"
    with pytest.raises(EpisodeForfeited):
        await first.execute_calls([call("die")])
    with pytest.raises(EnvironmentFailed, match=r"3.*minute"):
        await second.execute_calls([call("add", '{"a": 1}')])
    await first.close()
    await second.close()
    assert await gone(SERVER)


async def test_a_message_that_is_too_long_ends_the_session():
    manager = ToolManager([server(max_message_bytes=10_000)])
    await manager.open()
    assert len(await answers(manager, "large", size=9_000)) == 9_000
    with pytest.raises(EpisodeForfeited, match="10,000 bytes"):
        await manager.execute_calls([call("large", '{"size": 20000}')])
    await manager.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stubborn", "leaves"])
async def test_nothing_is_left_of_a_server_that_does_not_end_by_itself(fault):
    manager = ToolManager([server(fault)])
    await manager.open()
    before = time.monotonic()
    await manager.close()
    assert time.monotonic() - before < 7
    assert await gone(SERVER)
    assert not running("sleep\x00600")


async def test_a_server_ends_when_its_starter_is_killed(tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(
        "import asyncio, sys\nfrom palestra.tools import ToolManager\nfrom palestra_mcp import McpServer\n"
        f"async def main():\n    await ToolManager([McpServer([sys.executable, {SERVER!r}, 'stubborn'])]).open()\n"
        "    print('open', flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    starter = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert starter.stdout is not None
    assert await starter.stdout.readline() == b"open\n"
    assert running(SERVER)
    starter.send_signal(signal.SIGKILL)
    await starter.wait()
    assert await gone(SERVER)


def environment(*tools, **settings) -> ToolEnvironment:
    return ToolEnvironment(tools, lambda task, answer: float(answer == "5"), max_steps=3, **settings)


@pytest.mark.slow
def test_an_environment_with_a_server_of_tools_keeps_to_what_environments_have_to_do():
    check_environment(lambda: environment(server(tools=["add", "fail"])), [{"prompt": "2 + 3?"}])


def test_an_environment_whose_server_is_not_there_says_so():
    with pytest.raises(InvalidEnvironment, match="code 127"):
        check_environment(lambda: environment(McpServer(["/no/such/program"])), [{"prompt": "2 + 3?"}])


def test_who_can_not_keep_a_server_open_refuses_one():
    with pytest.raises(ValueError, match="agent keeps"):
        ToolAgent([server()])
    with pytest.raises(ValueError, match="to subagents"):
        SubagentEnvironment([], lambda task, answer: 0.0, tools=[server()])


STUBBORN = ("empty lines", "one line", "errors", "of a fork")


@pytest.mark.parametrize("kind", ["messages", *(pytest.param(kind, marks=pytest.mark.slow) for kind in STUBBORN)])
async def test_a_server_that_writes_without_a_pause_holds_up_nobody(kind):
    manager = ToolManager([server()], timeout_seconds=2.0)
    await manager.open()
    began = time.monotonic()
    if kind == "errors":
        (result,) = await manager.execute_calls([call("flood", json.dumps({"with": kind}))])
        assert result.failure is ToolFailure.TIMED_OUT
    else:
        with pytest.raises(EpisodeForfeited):
            await manager.execute_calls([call("flood", json.dumps({"with": kind}))])
    assert time.monotonic() - began < 5
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(0.5)
    assert time.monotonic() - began < 2
    assert time.process_time() - used < 0.3
    await manager.close()
    assert time.monotonic() - began < 9
    assert await gone(SERVER) or kind == "of a fork"
