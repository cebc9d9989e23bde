"""What the job fixes, what a caller may choose, and what can't be had where tokens are trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.errors import InvalidRequest, UnsupportedField
from palestra.session.sampling import overruled
from unit.session.conftest import call

pytestmark = pytest.mark.ci

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
RESHAPING = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_tokens": {"min_tokens": 2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": ((7, -100.0),)},
}
CONSTRAINTS = {
    "response_format": {"response_schema": {"type": "object"}},
    "tool_choice": {"tools": (TOOL,), "tool_choice": "required"},
}


@pytest.mark.parametrize("field", RESHAPING)
async def test_what_reshapes_the_distribution_is_refused_in_training_and_named(bench, field):
    session = await bench.session()
    with pytest.raises(UnsupportedField, match=rf"{field}.*possible") as caught:
        await session.generate_one(call("a", **RESHAPING[field]))
    assert caught.value.field == field
    assert await bench.recorded(session) == ()
    assert bench.engine.calls == 0


@pytest.mark.parametrize("field", RESHAPING)
async def test_where_the_job_says_so_it_is_left_out_in_training_which_is_said_and_counted(bench, field):
    bench.context = replace(bench.context, ignore_untrainable=True)
    session = await bench.session()
    plain = await session.generate_one(call("b"))
    wish = call("a", **RESHAPING[field])
    chat = await session.generate_one(wish)
    assert replace(chat.sampling, seed=0) == replace(plain.sampling, seed=0)
    assert overruled(wish, chat.sampling).startswith(f"{field}=")
    assert bench.context.counts["sampling_overruled"] == 1
    other = await (await bench.session("adhoc", field)).generate_one(wish)
    assert overruled(wish, other.sampling) is None


async def test_the_refusal_names_the_setting(bench):
    session = await bench.session()
    with pytest.raises(UnsupportedField, match=r'server\.unknown_fields.*"ignore"'):
        await session.generate_one(call("a", top_p=0.9))


@pytest.mark.parametrize("kind", ["validation", "adhoc"])
@pytest.mark.parametrize("field", RESHAPING)
async def test_elsewhere_it_comes_to_the_engine_and_into_the_record(bench, kind, field):
    session = await bench.session(kind)
    await session.generate_one(call("a", **RESHAPING[field]))
    (chat,) = await bench.recorded(session)
    plain = (await session.generate_one(call("b"))).sampling
    assert getattr(chat.sampling, field) != getattr(plain, field)


@pytest.mark.parametrize("kind", ["train", "validation", "adhoc"])
@pytest.mark.parametrize("field", CONSTRAINTS)
async def test_a_grammar_is_possible_everywhere_the_trainer_goes_through_it_too(bench, kind, field):
    session = await bench.session(kind)
    await session.generate_one(call("a", **CONSTRAINTS[field]))
    (chat,) = await bench.recorded(session)
    assert chat.sampling.grammar
    assert not (await session.generate_one(call("b"))).sampling.grammar


async def test_in_training_a_reply_may_end_where_the_caller_says(bench):
    """Where a reply ends changes no probability of the tokens before."""
    bench.script = lambda prompt, sampling: [*b"abcdef", 258]
    session = await bench.session()
    assert (await session.generate_one(call("a", stop=("cd",)))).reply.text == "ab"
    assert (await session.generate_one(call("b", stop_ids=(ord("e"),)))).sampling.stop_ids == (ord("e"),)


async def test_what_the_job_fixes_against_the_callers_wish_is_said_and_counted(bench):
    session = await bench.session()
    wish = call("a", temperature=0.1, seed=5, max_tokens=500)
    chat = await session.generate_one(wish)
    assert overruled(wish, chat.sampling) == "temperature=1, max_tokens=50, seed=job"
    assert bench.context.counts["sampling_overruled"] == 1
    kept = call("b", max_tokens=7, temperature=1.0)
    assert overruled(kept, (await session.generate_one(kept)).sampling) is None
    assert bench.context.counts["sampling_overruled"] == 1


async def test_choices_with_a_seed_of_the_callers_have_one_each(bench):
    session = await bench.session("adhoc")
    chats = await session.generate(call("a", choices=3, seed=2**63 - 1))
    assert [chat.sampling.seed for chat in chats] == [2**63 - 1, 0, 1]


# Constraints


async def grammar_of(bench, **fields) -> str:
    session = await bench.session("adhoc", request=repr(fields))
    return (await session.generate_one(call("a", **fields))).sampling.grammar


def accepts(grammar: str, text: str) -> bool:
    """Whether llguidance takes the text, byte by byte, and may end there."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = {"type": "function", "function": {"name": 'o"d', "parameters": {"type": "object"}}}


async def test_a_required_call_is_one_or_several_of_the_tools(bench):
    grammar = await grammar_of(bench, tools=(TOOL, OTHER), tool_choice="required")
    odd = '<tool_call>\n{"name": "o\\"d", "arguments": {"x": []}}\n</tool_call>'
    assert accepts(grammar, CALL)
    assert accepts(grammar, f"{CALL}\n{odd}")
    assert not accepts(grammar, "no")
    assert not accepts(grammar, CALL.replace("1", '"1"'))
    assert not accepts(grammar, CALL.replace("add", "sub"))
    assert not accepts(grammar, CALL.replace('"a": 1', '"a": 1, "made_up": 2'))
    assert accepts(grammar, "\n".join([CALL] * 8))
    assert not accepts(grammar, "\n".join([CALL] * 9))


async def test_a_named_call_is_one_of_that_tool_and_without_parallel_calls_it_is_one(bench):
    named = await grammar_of(bench, tools=(TOOL, OTHER), tool_choice="required", tool_name="add")
    single = await grammar_of(bench, tools=(TOOL, OTHER), tool_choice="required", parallel_tool_calls=False)
    assert [accepts(named, text) for text in (CALL, f"{CALL}\n{CALL}")] == [True, False]
    assert [accepts(single, text) for text in (CALL, f"{CALL}\n{CALL}")] == [True, False]


async def test_a_schema_is_met_and_tools_may_be_called_beside_it(bench):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    alone = await grammar_of(bench, response_schema=schema)
    beside = await grammar_of(bench, response_schema=schema, tools=(TOOL,))
    without = await grammar_of(bench, response_schema=schema, tools=(TOOL,), tool_choice="none")
    for grammar, calls in ((alone, False), (beside, True), (without, False)):
        assert accepts(grammar, '{"x": 5}')
        assert not accepts(grammar, '{"y": 5}')
        assert accepts(grammar, CALL) is calls


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_schema": {"type": "odd"}}, "response_format"),
        ({"response_schema": {"$ref": "http://localhost/x"}}, "response_format"),
        ({"tools": (TOOL,), "tool_choice": "required", "tool_name": "nobody"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_constraint_that_cant_be_met_is_refused_before_anything_is_sampled(bench, fields, field):
    session = await bench.session("adhoc")
    with pytest.raises(InvalidRequest) as caught:
        await session.generate_one(call("a", **fields))
    assert caught.value.field == field
    assert bench.engine.calls == 0
