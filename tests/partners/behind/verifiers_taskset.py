"""A taskset of verifiers with sums, two turns each, and a harness whose program is the real openai client."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SumHarness", "Sums"]
COUNT = 40


class SumData(vf.TaskData):
    answer: str
    fails: bool = False


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fails:
            raise ValueError("the judge is gone")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 if len(trace.last_reply or "") < 1000 else 0.0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    fails_from: int = COUNT
    """Tasks from this one on can't be scored."""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for n in range(COUNT):
            fails = n >= self.config.fails_from
            yield SumTask(SumData(prompt=f"{n} + 1?", answer=str(n + 1), fails=fails), self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime) -> None:
        return None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for asked in ("Are you sure?", None):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                if asked is not None:
                    messages.append({"role": "user", "content": asked})
        return ProgramResult(exit_code=0, stdout="", stderr="")
