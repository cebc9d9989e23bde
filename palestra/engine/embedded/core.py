"""The engine's loop, in its thread: schedule the passes of a step, run them, deliver the sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from palestra.engine.base import EngineLoad
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.model_runner import ModelRunner, PolicyModel
from palestra.engine.embedded.request import DONE, RunningRequest, Unprepared
from palestra.engine.embedded.sampling import SampledBatch
from palestra.engine.embedded.scheduler import Decode, Prefill, Scheduler, ServedPolicy
from palestra.errors import EngineFailure, GrammarRefused, PalestraError
from palestra.faults import fault_point
from palestra.types.calls import PolicyVersion, SampledTokens


class EngineCore:
    """Runs one scheduling step at a time and turns exceptions into failures of the requests that caused them."""

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        version: PolicyVersion,
        config: EmbeddedEngineConfig,
        deterministic: bool,
        kv_bytes: int,
    ) -> None:
        """Create the core.

        Policies on one base share its weights and its passes. `version` is that of the models' present weights.
        `deterministic`: results do not depend on the batch. `kv_bytes` are for keys and values of all policies, cached
        prefixes included.
        """
        self._config, self._deterministic = config, deterministic
        self.policies: dict[str, ServedPolicy] = {}
        for name, policy in policies.items():
            self._serve(name, policy, version)
        self._gone = (0, 0, 0)  # passes, prefilled and sampled tokens of runners that have no policy any more
        self.scheduler = Scheduler(self.policies, config, deterministic, kv_bytes)
        self._outbox: list[tuple[RunningRequest, Any]] = []

    def _serve(self, name: str, policy: PolicyModel, version: PolicyVersion) -> ServedPolicy:
        """Give a policy the runner of its base, or one of its own."""
        shared = (known.runner for known in self.policies.values() if known.runner.runs(policy.model))
        runner = next(shared, None) or ModelRunner(policy.model, self._deterministic)
        served = ServedPolicy(policy, version, runner)
        runner.policies[name] = self.policies[name] = served
        return served

    def add(self, name: str, policy: PolicyModel, version: PolicyVersion) -> None:
        """Add a policy."""
        self.scheduler.add_policy(self._serve(name, policy, version))

    def remove(self, name: str) -> None:
        """Fail a policy's requests, and drop its model."""
        error = EngineFailure(f"{name} was removed")
        waiting = [request for request in self.scheduler.waiting if request.policy == name]
        self.scheduler.waiting = [request for request in self.scheduler.waiting if request.policy != name]
        self._outbox += [(request, error) for request in waiting]
        self._fail_begun(error, (name,))
        gone = self.policies.pop(name)
        runner = gone.runner
        self.scheduler.remove_policy(name, gone)
        runner.forget(name)
        if not runner.policies:
            more = (runner.passes, runner.prefilled_tokens, runner.sampled_tokens)
            passes, prefilled, sampled = (before + new for before, new in zip(self._gone, more, strict=True))
            self._gone = passes, prefilled, sampled
        self.flush()

    def begin(self, request: RunningRequest) -> None:
        """Queue a request, or fail it if its policy was removed meanwhile."""
        if request.policy in self.policies:
            self.scheduler.add(request)
        else:
            self._outbox.append((request, EngineFailure(f"{request.policy} was removed")))
            self.flush()

    def step(self) -> None:
        """Run one step. A failure ends the request that caused it, or else all requests of its policy."""
        try:
            for work in self.scheduler.schedule():
                if not self._run(work):
                    break
                self.flush()  # the first token of a reply does not wait for the next tokens of all others
        except Exception as error:  # noqa: BLE001 - fails requests, not the engine
            self._survive(error, list(self.policies))
        self.flush()

    def load(self) -> EngineLoad:
        """Return waiting and running requests, and counters; see `Engine.load`."""
        # Read from other threads while the engine's may add a policy: a list of them is made in one piece.
        scheduler, (passes, prefilled, sampled) = self.scheduler, self._gone
        runners = {policy.runner for policy in list(self.policies.values())}
        return EngineLoad(
            waiting=len(scheduler.waiting),
            running=scheduler.begun,
            kv_bytes_used=scheduler.budget.reserved + scheduler.budget.kept,
            kv_bytes=scheduler.budget.total,
            passes=passes + sum(runner.passes for runner in runners),
            prefilled_tokens=prefilled + sum(runner.prefilled_tokens for runner in runners),
            sampled_tokens=sampled + sum(runner.sampled_tokens for runner in runners),
        )

    def fail_all(self, error: Exception) -> None:
        """Fail every request, including waiting ones."""
        waiting, self.scheduler.waiting = self.scheduler.waiting, []
        self._fail_begun(error, self.policies)
        self._outbox += [(request, _failure(error)) for request in waiting]

    def flush(self) -> None:
        """Deliver tokens and failures of the requests."""
        outbox, self._outbox = self._outbox, []
        for request, item in outbox:
            if not request.cancelled:
                try:
                    request.deliver(item)
                except RuntimeError:  # the caller's event loop is closed
                    request.cancelled = True

    # Passes.

    def _run(self, work: Prefill | Decode) -> bool:
        """Run one pass. False: it failed as a whole."""
        try:
            if isinstance(work, Prefill):
                self._prefill(work.runner, work.pieces)
            else:
                self._decode(work.runner, work.requests)
        except Exception as error:  # noqa: BLE001 - fails requests, not the engine
            self._survive(error, list(work.runner.policies))
            return False
        return True

    def _prefill(self, runner: ModelRunner, pieces: Sequence[tuple[RunningRequest, int]]) -> None:
        """Compute chunks of prompts, and sample the first token of each request whose prompt is complete."""
        new = dict(pieces)
        self._one_by_one(
            [leader for leader, count in pieces if count],
            lambda some: runner.prefill([(leader, new[leader]) for leader in some]),
        )
        leaders = {one: leader for leader in new if leader.hidden is not None for one in leader.group}

        def start(some: Sequence[RunningRequest]) -> None:
            hidden = [leader.hidden for one in some if (leader := leaders[one]).hidden is not None]
            sampled = runner.sample(some, torch.stack(hidden))
            for number, request in enumerate(some):
                self._start(runner, request, leaders[request], sampled, number)

        self._one_by_one(list(leaders), start)

    def _decode(self, runner: ModelRunner, requests: Sequence[RunningRequest]) -> None:
        """Sample the next token of each running reply; first fail replies whose grammar has no next token."""
        fault_point("during_generation")
        for name, policy in runner.policies.items():
            constrained = [one for one in requests if one.policy == name and one.matcher is not None]
            self._one_by_one(constrained, partial(self._advance, policy))

        def decode(some: Sequence[RunningRequest]) -> None:
            order, sampled = runner.decode(some)
            for number, request in enumerate(order):
                self._append(request, sampled, number)

        self._one_by_one([request for request in requests if request.row is not None], decode)

    def _one_by_one(self, requests: Sequence[RunningRequest], work: Callable[[Sequence[RunningRequest]], None]) -> None:
        """Run `work` for requests together; if it fails, for each alone. It changes nothing before its last error."""
        if not requests:
            return
        try:
            work(requests)
        except Exception as error:
            if _out_of_memory(error):
                raise
            if len(requests) == 1:
                self._fail(requests[0], error)
                return
            for request in requests:
                self._one_by_one([request], work)

    def _advance(self, policy: ServedPolicy, requests: Sequence[RunningRequest]) -> None:
        """Find the tokens that may come next in replies with a grammar."""
        for request, error in zip(requests, policy.advance_grammars(requests), strict=True):
            if error is not None:
                self._fail(request, error)

    def _start(
        self, runner: ModelRunner, request: RunningRequest, leader: RunningRequest, sampled: SampledBatch, number: int
    ) -> None:
        """Begin the reply of a request, whose prompt `leader` has computed, with its first token."""
        assert leader.keys is not None
        try:
            if request is leader:
                self.scheduler.keep_prefix(leader, leader.prompt, leader.keys)
            request.row = runner.add_row(leader.keys, leader.positions)
        except Exception as error:  # noqa: BLE001 - fails this request alone
            self._fail(request, error)
            return
        self.scheduler.start(request, leader)
        if request is leader:
            leader.keys = leader.hidden = leader.positions = None
        self._append(request, sampled, number)

    def _append(self, request: RunningRequest, sampled: SampledBatch, number: int) -> None:
        """Add the token of row `number` to a reply, and finish the reply where it ends."""
        token, policy = sampled.tokens[number], self.policies[request.policy]
        try:
            if not math.isfinite(sampled.logprobs[number]):
                raise EngineFailure("the model's scores of the next token are no numbers")
            request.append(token)
            piece = SampledTokens(
                ids=(token,),
                logprobs=(sampled.logprobs[number],),
                version=policy.version,
                top=(sampled.top[number],) if request.sampling.top_logprobs else (),
            )
            self._outbox.append((request, piece))
            if request.stops_at(token, policy.stops):
                self._outbox.append((request, DONE))
                self.scheduler.finish(request)
        except Exception as error:  # noqa: BLE001 - fails this request alone: those behind it have sampled as well
            self._fail(request, error)

    # Failures.

    def _fail(self, request: RunningRequest, error: Exception) -> None:
        self._outbox += [(one, _failure(error)) for one in request.group]
        self.scheduler.remove(request)

    def _survive(self, error: Exception, policies: Collection[str]) -> None:
        """Fail the newest request where memory ran out; after any other error all of the policies that have begun."""
        if isinstance(error, Unprepared):
            self._fail(error.request, error.cause)
            return
        newest = (*self.scheduler.running, *self.scheduler.prefilling)[-1:]
        if _out_of_memory(error) and newest:
            self._fail(newest[0], error)
            for policy in self.policies.values():
                policy.prefixes.clear()
                policy.runner.free_unused()
            return
        self._fail_begun(error, policies)

    def _fail_begun(self, error: Exception, policies: Collection[str]) -> None:
        """Fail all running requests of some policies, and drop what their models have computed."""
        self._outbox += [(request, _failure(error)) for request in self.scheduler.remove_all(policies)]


def _failure(error: Exception) -> PalestraError:
    """Return the error for the caller: a grammar over its bound is the request's fault, all else the engine's."""
    if isinstance(error, GrammarRefused | EngineFailure):
        return error
    return EngineFailure(f"{type(error).__name__}: {error}")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
