from __future__ import annotations

import asyncio
import threading
import time

import pytest

from palestra.tools import Calculator, Finish, Tool, ToolFailure, ToolManager, tool
from palestra.types.messages import FunctionCall, ToolCall


def call(name: str, arguments: str = "{}", call_id: str = "c") -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


@tool
def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: the first
            number.
        b: the second.
    """
    return a + b


@tool(name="wait")
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@tool
def block(seconds: float) -> str:
    time.sleep(seconds)
    return threading.current_thread().name


@tool
def broken(text: str) -> str:
    raise KeyError(text)


class Search(Tool):
    """With a schema of its own, and `apply`."""

    def get_json_schema(self):
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
        return {"type": "function", "function": {"name": "search", "parameters": parameters}}

    def apply(self, **arguments):
        return {"hits": [arguments["query"]]}


def manager(**more) -> ToolManager:
    return ToolManager([add, slow, block, broken, Search(), Calculator(), Finish()], **more)


async def test_results_come_in_the_order_of_the_calls_with_their_ids():
    calls = [
        call("wait", '{"seconds": 0.05}', "x"),
        call("add", '{"a": 2}', "y"),
        call("search", '{"query": "é"}', "z"),
    ]
    found = await manager().execute_calls(calls)
    assert [(r.call_id, r.content, r.failure) for r in found] == [
        ("x", "done", None),
        ("y", "3", None),
        ("z", '{"hits":["é"]}', None),
    ]
    message = found[2].message
    assert (message.role, message.text, message.tool_call_id, message.name) == ("tool", '{"hits":["é"]}', "z", "search")


@pytest.mark.parametrize(
    ("name", "arguments", "failure", "words"),
    [
        ("subtract", "{}", ToolFailure.UNKNOWN_TOOL, "no tool 'subtract'; known are add, wait"),
        ("add", "{", ToolFailure.BAD_ARGUMENTS, "not valid JSON"),
        ("add", "[1]", ToolFailure.BAD_ARGUMENTS, "not a JSON object"),
        ("add", '{"a": "two"}', ToolFailure.BAD_ARGUMENTS, "a: Input should be a valid integer"),
        ("add", '{"a": 1, "c": 2}', ToolFailure.BAD_ARGUMENTS, "c: Extra inputs"),
        ("add", "", ToolFailure.BAD_ARGUMENTS, "a: Field required"),
        ("search", "{}", ToolFailure.BAD_ARGUMENTS, "'query' is missing"),
        ("search", '{"query": "", "n": 1}', ToolFailure.BAD_ARGUMENTS, "no argument 'n'"),
        ("broken", '{"text": "why"}', ToolFailure.RAISED, "KeyError: 'why'"),
        ("calculator", '{"expression": "import os"}', ToolFailure.BAD_ARGUMENTS, "not an arithmetic expression"),
        ("add", "[" * 100_000, ToolFailure.BAD_ARGUMENTS, "not valid JSON"),
    ],
)
async def test_every_failure_is_something_that_the_model_can_read_and_a_counter(name, arguments, failure, words):
    tools = manager()
    (result,) = await tools.execute_calls([call(name, arguments)])
    assert result.failure is failure
    assert words in result.content
    assert tools.counts == {"calls": 1, failure.value: 1}


@pytest.mark.parametrize("name", ["wait", "block"])
async def test_a_tool_that_hangs_is_given_up_and_the_others_are_not(name):
    tools = manager(timeout_seconds=0.1)
    started = time.monotonic()
    hanging, fine = await tools.execute_calls([call(name, '{"seconds": 5}'), call("add", '{"a": 1}')])
    assert time.monotonic() - started < 2
    assert (hanging.failure, fine.failure) == (ToolFailure.TIMED_OUT, None)
    assert "longer than 0.1 s" in hanging.content


async def test_a_time_out_that_a_tool_raises_itself_is_its_failure_not_ours():
    @tool
    def fetch() -> str:
        raise TimeoutError("no answer from the site")

    (result,) = await ToolManager([fetch]).execute_calls([call("fetch")])
    assert (result.failure, "no answer from the site" in result.content) == (ToolFailure.RAISED, True)


async def test_a_hundred_calls_that_block_run_side_by_side():
    calls = [call("block", '{"seconds": 0.5}') for _ in range(100)]
    started = time.monotonic()
    found = await manager().execute_calls(calls)
    assert time.monotonic() - started < 10  # one after another: 50 s
    assert not any(r.failure for r in found)


async def test_cancelling_ends_the_waiting():
    task = asyncio.ensure_future(manager().execute_calls([call("wait", '{"seconds": 60}')] * 3))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_long_results_are_cut_and_odd_ones_are_written_somehow():
    @tool
    def long() -> str:
        return "x" * 100

    @tool
    def odd() -> object:
        return {1, "\ud800"} and object

    cut, strange = await ToolManager([long, odd], max_result_chars=10).execute_calls([call("long"), call("odd")])
    assert cut.content == "x" * 10 + "… (100 characters, cut)"
    assert strange.content.startswith("<class")


def test_two_tools_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="'add'"):
        ToolManager([add, add])


def test_the_schema_is_made_from_signature_and_docstring():
    (schema,) = ToolManager([add]).schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Adds."
    parameters = schema["function"]["parameters"]
    assert parameters["properties"] == {
        "a": {"type": "integer", "description": "the first number."},
        "b": {"type": "integer", "default": 1, "description": "the second."},
    }
    assert parameters["required"] == ["a"]
    assert add(2, 3) == 5


@pytest.mark.parametrize("function", [lambda x: x, lambda *x: x])
def test_a_function_without_types_or_names_is_refused(function):
    with pytest.raises(TypeError, match=r"no type|by name"):
        tool(function)


async def test_apply_may_be_asynchronous():
    class Where(Tool):
        def get_json_schema(self):
            return {"type": "function", "function": {"name": "where"}}

        async def apply(self, **arguments):
            await asyncio.sleep(0)
            return threading.current_thread().name

    results = await ToolManager([Where()]).execute_calls([call("where")])
    assert [result.content for result in results] == [threading.current_thread().name]
