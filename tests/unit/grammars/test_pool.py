"""Grammars: what is shared, what is bounded, and what ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from palestra.errors import EngineFailure, GrammarRefused, InvalidRequest, TooManyRequests
from palestra.grammars import pool, worker
from palestra.grammars.matcher import BOUNDS
from palestra.grammars.pool import Grammars

pytestmark = pytest.mark.ci

WORDS = 'start: "ab" | "cd"\n'
ROOMY = replace(BOUNDS, memory_mib=4096)


def of_schema(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


ALL_OF = of_schema({"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*"} for i in range(300)]})
SLOW = of_schema({"type": "integer", "multipleOf": 999983})
GROWING = of_schema({"type": "string", "pattern": ".*a.{200}"})  # every text of it leads to another state


@pytest.fixture
def make():
    made: list[Grammars] = []

    def grammars(bounds=BOUNDS) -> Grammars:
        made.append(Grammars(bounds=bounds))
        return made[-1]

    yield grammars
    for one in made:
        one.close()


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def compiles(grammars: Grammars) -> bool:
    """Whether the process compiles one that takes long."""
    return any(one.examined for one in grammars._compiling.values())


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_matchers_of_one_grammar_do_not_know_of_each_other(make):
    grammars = make()
    one, other = await grammars.matcher(WORDS), await grammars.matcher(WORDS)
    assert allowed(one.mask) == allowed(other.mask) == {ord("a"), ord("c")}
    one.accept(ord("a"))
    assert grammars.advance([one, other]) == [None, None]
    assert (allowed(one.mask), allowed(other.mask)) == ({ord("b")}, {ord("a"), ord("c")})
    one.accept(ord("x"))
    other.accept(ord("c"))
    error, fine = grammars.advance([one, other])
    assert isinstance(error, GrammarRefused)
    assert fine is None
    assert allowed(other.mask) == {ord("d")}


async def test_masks_are_those_of_llguidance_in_one_process(make):
    from llguidance import LLMatcher, LLTokenizer

    grammar = of_schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    matcher = await make().matcher(grammar)
    plain = LLMatcher(LLTokenizer("byte"), grammar)
    text = b'{"a":"y"}'
    masks = [plain.compute_bitmask()]
    for byte in text:
        assert plain.consume_token(byte)
        masks.append(plain.compute_bitmask())
    found = [matcher.mask]
    grammars = make()
    again = await grammars.matcher(grammar)
    for byte in text:
        again.accept(byte)
        assert grammars.advance([again]) == [None]
        found.append(again.mask)
    assert found == masks
    walked = grammars.walk(grammar, list(text), [0, 3, 8])
    assert [row.tobytes() for row in walked] == [masks[0], masks[3], masks[8]]


async def test_no_process_is_started_before_the_first_grammar_and_none_is_left(make):
    grammars = make()
    assert grammars._worker.pid is None
    await grammars.check(WORDS, "choices")
    pid = grammars._worker.pid
    assert runs(pid)
    grammars.close()
    await until(lambda: not runs(pid))
    with pytest.raises(EngineFailure):
        await grammars.check(ALL_OF, "response_format")


@pytest.mark.slow
@pytest.mark.parametrize(("grammar", "bound"), [(ALL_OF, "MiB of memory"), (SLOW, "s of processor time|MiB of memory")])
async def test_a_bomb_is_refused_by_its_bound_and_its_field_and_again_without_a_process(make, grammar, bound):
    grammars = make()
    with pytest.raises(GrammarRefused, match=rf"response_format.*({bound})") as first:
        await grammars.check(grammar, "response_format")
    assert (first.value.http_status, first.value.retryable, first.value.field) == (400, False, "response_format")
    assert not runs(grammars._worker.pid)  # a second compilation would start another one
    with pytest.raises(GrammarRefused, match="tool_choice"):
        await grammars.check(grammar, "tool_choice")
    assert not runs(grammars._worker.pid)
    await grammars.check(WORDS, "choices")
    assert runs(grammars._worker.pid)


async def test_a_refusal_for_time_is_not_for_ever(make, monkeypatch):
    grammars = make(replace(ROOMY, compile_cpu_seconds=0.05))
    with pytest.raises(GrammarRefused, match=r"0\.05 s"):
        await grammars.check(SLOW, "response_format")
    grammars._bounds = replace(ROOMY, compile_cpu_seconds=200.0, compile_wall_seconds=0.2)
    with pytest.raises(GrammarRefused, match="processor time"):  # remembered
        await grammars.check(SLOW, "response_format")
    monkeypatch.setattr(pool, "FORGET_SECONDS", 0.0)
    grammars._known_grammars.clear()
    with pytest.raises(GrammarRefused, match=r"0\.2 s"):
        await grammars.check(SLOW, "response_format")
    grammars._bounds = replace(ROOMY, compile_cpu_seconds=0.05)
    with pytest.raises(GrammarRefused, match="processor time"):  # tried again
        await grammars.check(SLOW, "response_format")


async def test_compiling_ends_when_the_last_of_those_who_wait_goes_away(make):
    grammars = make(replace(ROOMY, compile_cpu_seconds=300.0, compile_wall_seconds=300.0))
    one, other = (asyncio.ensure_future(grammars.check(SLOW, "response_format")) for _ in range(2))
    await until(lambda: compiles(grammars))
    pid = grammars._worker.pid
    one.cancel()
    await asyncio.wait([one])
    assert runs(pid)
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])
    await until(lambda: not runs(pid))
    assert grammars._compiling == {}
    await grammars.check(WORDS, "choices")  # the thread is free again


async def test_too_many_at_the_same_time_are_refused_and_may_come_again(make, monkeypatch):
    monkeypatch.setattr(pool, "MOST_WAITING", 1)
    grammars = make(replace(ROOMY, compile_cpu_seconds=300.0, compile_wall_seconds=300.0))
    slow = [of_schema({"type": "integer", "multipleOf": 999983 + k}) for k in range(0, 30, 10)]
    tasks = [asyncio.ensure_future(grammars.check(one, "response_format")) for one in slow[:2]]
    await until(lambda: len(grammars._compiling) == 2)
    with pytest.raises(TooManyRequests, match=r"wait.*compiled") as caught:
        await grammars.check(slow[2], "response_format")
    assert caught.value.retryable
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_waits_for_a_grammar_that_is_not_being_compiled_yet_hears_of_the_end(make):
    grammars = make(replace(ROOMY, compile_cpu_seconds=300.0, compile_wall_seconds=300.0))
    slow = [of_schema({"type": "integer", "multipleOf": 999983 + k}) for k in range(0, 200, 10)]
    tasks = [asyncio.ensure_future(grammars.check(one, "response_format")) for one in slow]
    await until(lambda: compiles(grammars))
    grammars.close()
    async with asyncio.timeout(30):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in found] == [EngineFailure] * 20


async def test_a_reply_over_a_bound_ends_alone(make):
    grammars = make(replace(BOUNDS, lexer_states=60))
    bad, good = await grammars.matcher(GROWING), await grammars.matcher(WORDS)
    bad.accept(ord('"'))
    assert grammars.advance([bad, good]) == [None, None]
    error = None
    for _ in range(100):
        bad.accept(ord("a"))
        (error, fine) = grammars.advance([bad, good])
        assert fine is None
        if error is not None:
            break
    assert isinstance(error, GrammarRefused)
    assert "too many states" in str(error)
    good.accept(ord("a"))
    assert grammars.advance([good]) == [None]
    assert allowed(good.mask) == {ord("b")}


async def test_a_process_that_is_killed_from_outside_is_no_fault_of_the_grammar(make):
    grammars = make(replace(ROOMY, compile_cpu_seconds=300.0, compile_wall_seconds=300.0))
    matcher = await grammars.matcher(WORDS)
    checking = asyncio.ensure_future(grammars.check(SLOW, "response_format"))
    await until(lambda: compiles(grammars))
    os.kill(grammars._worker.pid, signal.SIGKILL)
    with pytest.raises(EngineFailure):
        await checking
    await grammars.check(of_schema({"type": "boolean"}), "response_format")
    matcher.accept(ord("a"))
    assert grammars.advance([matcher]) == [None]
    assert allowed(matcher.mask) == {ord("b")}


async def test_a_process_that_keeps_much_memory_is_replaced_by_another_one(make, monkeypatch):
    grammars = make()
    await grammars.check(WORDS, "choices")
    first = grammars._worker.pid
    await grammars.check('start: "x"\n', "choices")
    assert grammars._worker.pid == first
    monkeypatch.setattr(worker, "_KEPT_SHARE", -1.0)
    with pytest.raises(InvalidRequest):
        await grammars.check("start: nothing\n", "choices")
    assert not runs(first)
    await grammars.check('start: "y"\n', "choices")


async def test_no_more_compiled_grammars_are_kept_than_a_fixed_number(make, monkeypatch):
    monkeypatch.setattr(pool, "MOST_KEPT", 2)
    grammars = make()
    matchers = [await grammars.matcher(f'start: "{letter}z"\n') for letter in "abc"]
    assert len(grammars._compiled) == 2
    for matcher, letter in zip(matchers, "abc", strict=True):
        matcher.accept(ord(letter))
    assert grammars.advance(matchers) == [None] * 3
    assert [allowed(matcher.mask) for matcher in matchers] == [{ord("z")}] * 3


async def test_the_texts_of_kept_grammars_are_bounded_and_the_newest_is_kept(make, monkeypatch):
    monkeypatch.setattr(pool, "MOST_BYTES", 40)
    grammars, kept = make(), []
    for text in ("a", "b", "c" * 20, "d" * 50, "e"):
        await grammars.matcher(f'start: "{text}"\n')
        kept.append([one.size for one in grammars._compiled.values()])
    assert kept == [[11], [11, 11], [30], [60], [11]]


async def test_what_can_not_be_compiled_is_refused_as_what_it_is(make):
    grammars = make()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"schema.*used") as caught:
            await grammars.check("start: nothing\n", "choices")
        assert not isinstance(caught.value, GrammarRefused)
        with pytest.raises(InvalidRequest, match=r"grammar.*used"):
            await grammars.matcher("start: nothing\n")


def test_nothing_is_left_when_the_server_is_killed_while_a_bomb_is_compiled():
    script = (
        "import asyncio, sys\n"
        "from dataclasses import replace\n"
        "from palestra.grammars.matcher import BOUNDS\n"
        "from palestra.grammars.pool import Grammars\n"
        "async def main():\n"
        "    long = replace(BOUNDS, memory_mib=8192, compile_cpu_seconds=300.0, compile_wall_seconds=300.0)\n"
        "    g = Grammars(bounds=long)\n"
        "    asyncio.ensure_future(g.check(sys.argv[1], 'f'))\n"
        "    while not any(one.examined for one in g._compiling.values()):\n"
        "        await asyncio.sleep(0.01)\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(g._worker.pid, flush=True)\n"
        "    await asyncio.sleep(300)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, SLOW], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert runs(pid)
        server.kill()
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline, "a grammar process outlived the server"
        time.sleep(0.01)


async def test_the_process_loads_no_torch_and_gets_no_key(make, monkeypatch):
    monkeypatch.setenv("PALESTRA_API_KEY", "secret-key")
    grammars = make()
    await grammars.check(WORDS, "choices")
    assert b"secret-key" not in Path(f"/proc/{grammars._worker.pid}/environ").read_bytes()
    assert "torch" not in Path(f"/proc/{grammars._worker.pid}/maps").read_text()


async def test_a_reply_that_is_over_is_not_walked(make):
    grammars = make()
    matcher = await grammars.matcher(WORDS)
    matcher.accept(ord("x"))
    grammars.release(matcher)
    assert grammars.advance([matcher]) == [None]


@pytest.mark.parametrize("grammar", [WORDS, 'start: "a" | "ab" | "abc"\n', 'start: "\u00e4" | "\u00f6"\n'])
async def test_a_stray_token_of_a_reply_is_refused_wherever_it_stands(make, grammar):
    grammars, reply = make(), list(grammar.split('"')[1].encode())
    for place in range(len(reply)):
        (mask,) = grammars.walk(grammar, reply[:place], [place])
        assert allowed(grammars.following(grammar, reply[:place]).tobytes()) == allowed(mask.tobytes())
        assert reply[place] in allowed(mask.tobytes())
        with pytest.raises(InvalidRequest):
            grammars.walk(grammar, [*reply[:place], ord("!")], [])
    assert grammars.walk(grammar, reply, range(len(reply)), keep=False).size == 0
