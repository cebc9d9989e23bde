"""The floor of the data plane: an ASGI app that answers canned bodies and does nothing else.

`python bench/bare_app.py` listens on a free port of 127.0.0.1 and prints where. It speaks enough of the data plane for
`load.py` to treat it like Palestra: claims, ends, and chat completions of 32 tokens with logprobs.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import uvicorn

TOKENS = 32
JSON_HEADERS = [(b"content-type", b"application/json")]


def completion() -> bytes:
    """A reply as long as those of the fake engine at most are."""
    logprobs = [{"token": "7", "logprob": -1.0, "bytes": [55], "top_logprobs": []} for _ in range(TOKENS)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "7" * TOKENS, "refusal": None},
        "finish_reason": "length",
        "logprobs": {"content": logprobs, "refusal": None},
    }
    usage = {"prompt_tokens": 800, "completion_tokens": TOKENS, "total_tokens": 800 + TOKENS}
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "policy"}
    return json.dumps({**head, "choices": [choice], "usage": usage}, separators=(",", ":")).encode()


class BareApp:
    """Reads a request to its end and answers by its path."""

    def __init__(self, url: str) -> None:
        episode = {"episode_id": "e0", "base_url": f"{url}/v1", "api_key": "any", "model": "policy"}
        claim = {"status": "claimed", "episode": {**episode, "task": {"question": "?" * 200}}, "job_state": "running"}
        self._answers = {
            "/v1/chat/completions": completion(),
            "/claim_episode": json.dumps(claim).encode(),
            "/end_episode": b'{"episode_id":"e0","state":"completed"}',
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        while (await receive()).get("more_body"):
            pass
        body = self._answers.get(scope["path"], b"{}")
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until SIGTERM."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = uvicorn.Config(
        BareApp(url), loop="uvloop", http="httptools", log_config=None, access_log=False, lifespan="off", backlog=4096
    )
    print(f"data plane at {url}", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
