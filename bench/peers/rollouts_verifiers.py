"""verifiers' classic MultiTurnEnv.generate with a model that answers immediately and an `env_response` that sleeps.

Prints a JSON line. Its first model call has no environment step before it, so an episode has one call more than sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from sleeps import STEPS, Meter, workload_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import verifiers as vf
from datasets import Dataset
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

logging.disable(logging.WARNING)


class AnswersAtOnce(Client):
    """A model in this process."""

    def setup_client(self, config: Any) -> None:
        """Nothing."""

    async def to_native_tool(self, tool: Any) -> Any:
        """As it is."""
        return tool

    async def to_native_prompt(self, messages: Any) -> Any:
        """As it is."""
        return messages, {}

    async def get_native_response(self, *_: Any, **__: Any) -> str:
        """Answer."""
        return "answer"

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing is wrong."""

    async def from_native_response(self, response: Any) -> Response:
        """The answer as verifiers knows it."""
        message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
        return Response(id="r", created=1, model="m", message=message)

    async def close(self) -> None:
        """Nothing."""


class Sleeping(vf.MultiTurnEnv):
    """Answers every action after the seconds given beforehand."""

    table: Sequence[Sequence[float]] = ()

    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        """Sleep, then show something."""
        await asyncio.sleep(self.table[state["example_id"]][len(state["trajectory"]) - 1])
        return [{"role": "user", "content": "observed"}]


def main() -> None:
    """Run."""
    work, _ = workload_of(__doc__)
    Sleeping.table = work.sleeps()
    rows = Dataset.from_list([{"question": "What next?", "answer": "a"}] * work.episodes)
    env = Sleeping(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, **_: 1.0]), max_turns=STEPS + 1)
    inputs = env.get_dataset().to_list()
    quiet: dict[str, Any] = {"on_progress": lambda *_: None, "on_start": lambda *_: None}
    with Meter() as meter:
        found = asyncio.run(
            env.generate(
                inputs,
                client=AnswersAtOnce(object()),
                model="m",
                max_concurrent=work.slots,
                independent_scoring=True,
                **quiet,
            )
        )
    meter.tell(work, len(found["outputs"]))


if __name__ == "__main__":
    main()
