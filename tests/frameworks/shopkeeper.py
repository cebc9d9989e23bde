"""A model that plays the shop of `agents/shop.py`: calls tools as the question asks, and answers from their results."""

from __future__ import annotations

import json
import re

TURN, END = "<|im_start|>assistant\n", "<|im_end|>"


def call_text(name: str, **arguments: object) -> str:
    """As a model writes it: spaces where no library would put them."""
    return (
        f'<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments, ensure_ascii=False)} }}\n</tool_call>'
    )


def shopkeeper(prompt: str, seed: int) -> str:
    """The reply to the newest messages, whatever came before them."""
    newest = prompt.removesuffix(TURN).rsplit(TURN, 1)[-1].rsplit("<|im_start|>user\n", 1)[-1].split(END)[0]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", newest, re.S)
    if results:
        if "assistant" in results[0]:  # the conversation was handed over; the question is an earlier message
            return "\n".join(call_text("price", item=item, count=count) for item, count in (("lamp", 3), ("chair", 2)))
        totals = [int(re.findall(r"\d+", result)[-1]) for result in results]
        if len(totals) == 2 and '"add"' in prompt:
            return "Let me  see.\n" + call_text("add", a=totals[0], b=totals[1])
        return answer(totals)
    if '"ask_clerk"' in prompt:
        return "\n".join(call_text("ask_clerk", input=f"What do {what} cost?") for what in ("3 lamps", "2 chairs"))
    if '"transfer_to_clerk"' in prompt:
        return call_text("transfer_to_clerk")
    wanted = re.findall(r"(\d+|a) (lamp|chair|desk)", newest)
    calls = [call_text("price", item=item, count=1 if count == "a" else int(count)) for count, item in wanted]
    return "\n".join(calls) or "You  are welcome – é! 👩‍💻 "


def answer(totals: list[int]) -> str:
    """With spaces that a tokenizer or a library might not keep."""
    return f"It  is {' and '.join(map(str, totals))}.\n"


def thoughtful_shopkeeper(prompt: str, seed: int) -> str:
    """The same, thinking before each reply."""
    return f"<think>\nLet me see: {len(prompt)}.\n</think>\n\n{shopkeeper(prompt, seed)}"


def offering_shopkeeper(prompt: str, seed: int) -> str:
    """One price, then an offer: as a call of `final_result` where there is such a tool, as JSON where there is none."""
    if "final_result" in prompt and "<tool_response>" in prompt:
        return call_text("final_result", item="lamp", total=60)
    if '"price"' in prompt and "<tool_response>" not in prompt:
        return call_text("price", item="lamp", count=3)
    return json.dumps({"item": "lamp", "total": 60})


def verbose_shopkeeper(prompt: str, seed: int) -> str:
    """More than a low limit allows."""
    return "This  is a very long – é – answer, and it does not end soon."


def observing_shopkeeper(prompt: str, seed: int) -> str:
    """The shop of smolagents: a user's message tells what tools returned, and an answer is a call of its own."""
    newest = prompt.removesuffix(TURN).rsplit("<|im_start|>user\n", 1)[-1].split(END)[0]
    _, _, question = newest.partition("New task:")
    if question:
        wanted = re.findall(r"(\d+|a) (lamp|chair|desk)", question)
        calls = [call_text("price", item=item, count=1 if count == "a" else int(count)) for count, item in wanted]
        return "\n".join(calls) or call_text("final_answer", answer="You  are welcome – é! 👩‍💻 ")
    totals = [int(line.split()[-1]) for line in newest.splitlines() if line[-1:].isdigit()]
    if len(totals) == 2:
        return "Let me  see.\n" + call_text("add", a=totals[0], b=totals[1])
    return call_text("final_answer", answer=answer(totals))


def coding_shopkeeper(prompt: str, seed: int) -> str:
    """The shop of smolagents' CodeAgent: each reply is Python."""
    newest = prompt.removesuffix(TURN).rsplit("<|im_start|>user\n", 1)[-1].split(END)[0]
    _, _, question = newest.partition("New task:")
    wanted = re.findall(r"(\d+|a) (lamp|chair|desk)", question)
    calls = [f'print(price("{item}",  {1 if count == "a" else count}))' for count, item in wanted]
    totals = [int(line.split()[-1]) for line in newest.splitlines() if line[-1:].isdigit()]
    if len(totals) == 2:
        calls = [f"print(add({totals[0]},  {totals[1]}))"]
    elif not calls:
        calls = [f"final_answer({answer(totals) if totals else 'You  are welcome – é! 👩‍💻 '!r})"]
    return "Thought: let me  see.\n<code>\n" + "\n".join(calls) + "\n</code>"
