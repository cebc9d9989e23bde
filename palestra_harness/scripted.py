"""A model that follows a script: it writes a file with whatever tool it is offered, and then says that it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palestra.config import JobConfig
from palestra.engine.fake import FakeEngine
from palestra.errors import ModelError
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.runtime.parts import Parts
from palestra.session import PolicyRuntime, PolicySet
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import Ids, SamplingParams

ENGINE = "fake"  # the kind of engine that replies from a script
FILE, WORD = "palestra.txt", "palestra"
COMMAND = f"echo {WORD} > {FILE}"
DONE = "The file is written."
TOKENIZER = "SmolLM2-135M-Instruct"
_NAMES = ("command", "cmd", "commands", "script")  # of the parameter of a tool that runs a shell command
_PATHS, _TEXTS = ("path", "file_path", "filePath", "absolute_path"), ("content", "contents", "text", "file_text")


def scripted_parts(config: JobConfig, script: Sequence[str]) -> tuple[Parts, bool]:
    """Return the parts of a job whose model follows a script, and whether its tokens are SmolLM2's; else bytes.

    Args:
        script: of a harness; empty: the model chooses among the tools.
    """
    try:
        tokenizer, real = load_tokenizer(TOKENIZER), True
    except ModelError:
        tokenizer, real = ByteTokenizer(), False
    renderer = ChatMLRenderer(tokenizer)

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        text = reply_to(str(tokenizer.decode(prompt.tolist(), skip_special_tokens=False)), script)
        # A character at a time: never in the tokens of the tokenizer's choice, so that tokens made of text anew differ.
        pieces = [tokenizer.encode(character, add_special_tokens=False) for character in text]
        return [token for piece in pieces for token in piece] + [renderer.stop_ids[0]]

    engine = FakeEngine(reply)
    runtimes = {
        name: PolicyRuntime(name=name, config=policy, renderer=renderer, engine=engine, grammars=Grammars())
        for name, policy in config.policies.items()
    }
    return Parts(engine=engine, trainer=FakeTrainer(1), policies=PolicySet.of(config, runtimes)), real


def reply_to(prompt: str, script: Sequence[str]) -> str:
    """Return the reply to a prompt in ChatML.

    Args:
        script: replies in their order; a prompt with n of them, or with n results, gets the one after n. Other replies
            in a prompt are examples.
    """
    listed = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    said = prompt[listed.end() :] if listed else prompt
    results, replies = said.count("<tool_response>\n"), sum(reply.strip() in prompt for reply in script)
    turn = max(results, replies) if script else results if listed else 1
    if script:
        return script[turn] if turn < len(script) else DONE
    call = None if turn or listed is None else _call_of(_tools(listed[1]))
    if call is None:
        return DONE
    name, arguments = call
    # The white space is no parser's, so that a call that is written anew has other tokens.
    return (
        f'I write  the file.\n<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)} }}\n</tool_call>'
    )


def _tools(listed: str) -> Iterator[Mapping[str, Any]]:
    """Yield the functions of the tools in a prompt, one a line."""
    for line in listed.split("\n"):
        try:
            yield json.loads(line)["function"]
        except (ValueError, KeyError, TypeError):  # a description that holds a line like `</tools>`, say
            continue


def _call_of(tools: Iterator[Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Return a call that writes the file: of a tool that runs commands, or one that writes files."""
    writer = None
    for tool in tools:
        known = (tool.get("parameters") or {}).get("properties") or {}
        required = (tool.get("parameters") or {}).get("required") or []
        if (key := _first(_NAMES, known)) is not None:
            value: Any = ["bash", "-c", COMMAND] if known[key].get("type") == "array" else COMMAND
            return str(tool["name"]), {key: value, **_rest(known, required, key)}
        path, text = _first(_PATHS, known), _first(_TEXTS, known)
        if path is not None and text is not None:
            writer = str(tool["name"]), {path: FILE, text: f"{WORD}\n", **_rest(known, required, path, text)}
    return writer


def _first(names: Sequence[str], known: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in known), None)


def _rest(known: Mapping[str, Any], required: Sequence[str], *given: str) -> dict[str, Any]:
    """Return values for the other parameters that a tool needs."""
    plain: Mapping[Any, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    found: dict[str, Any] = {}
    for name in set(required) & known.keys() - set(given):
        choices = known[name].get("enum")
        found[name] = choices[0] if choices else plain.get(known[name].get("type"), "write the file")
    return found
