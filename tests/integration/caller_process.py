"""Conversations of one episode, a thread each: `python caller_process.py BASE_URL KEY BRANCH…`, of three turns."""

from __future__ import annotations

import sys
import threading
from typing import Any

import openai


def converse(base_url: str, key: str, branch: str) -> None:
    """Equal branches are attempts at the same; where a reply leads depends on the reply alone."""
    with openai.OpenAI(base_url=base_url, api_key=key) as ai:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": branch}]
        for _ in range(3):
            reply = ai.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"{reply}?"}]


if __name__ == "__main__":
    url, api_key, *branches = sys.argv[1:]
    threads = [threading.Thread(target=converse, args=(url, api_key, branch)) for branch in branches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
