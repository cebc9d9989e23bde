"""Decides which requests the engine computes next. A request waits, is admitted, prefilled, decoded, and leaves.

Requests join and leave between passes. A prompt shared by several requests is computed once. The tokens of a pass
belong to one policy, or to several with adapters on one base; other policies take turns. All share the engine's memory
and limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from palestra.engine.base import PREFIX_TOKENS
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.kv_cache import KVBudget
from palestra.engine.embedded.model_runner import ModelRunner
from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.engine.embedded.request import RunningRequest, Unprepared
from palestra.errors import ModelError, PalestraError
from palestra.models.weights import WeightSource
from palestra.tokens import TokenRun
from palestra.types.calls import PolicyVersion

if TYPE_CHECKING:
    from palestra.engine.embedded.model_runner import PolicyModel

PREFILL_TOKENS = 2048  # most prompt tokens of one forward pass; more make it no faster, and need memory
PREFILL_CHUNK = 512  # the same while replies are being sampled, so that a long prompt does not delay them


class ServedPolicy:
    """A policy that an engine samples from.

    Attributes:
        stops: tokens that end its replies.
        prefixes: keys and values computed by its present weights.
        runner: computes its passes, perhaps together with policies on the same base.
    """

    def __init__(self, policy: PolicyModel, version: PolicyVersion, runner: ModelRunner) -> None:
        self.model, self.stops, self._grammars = policy.model, policy.stop_ids, policy.grammars
        self.version, self.runner = version, runner
        self.prefixes = PrefixCache(PREFIX_TOKENS)

    def longest_bytes(self, request: RunningRequest) -> int:
        """Return the key-value bytes of a request's longest possible reply."""
        length = len(request.prompt)
        longest = min(length + request.sampling.max_tokens, self.model.max_positions)
        return self.runner.capacity(max(longest, length + 1)) * self.model.token_bytes

    def keep_prefix(self, tokens: TokenRun, keys: Tensor, room: int) -> None:
        """Cache keys and values. `keys` are [layers, 2, key heads, N, head dim]; `room` limits the policy's cached
        prefixes, in tokens.
        """
        self.prefixes.capacity = min(PREFIX_TOKENS, room)
        self.prefixes.insert(tokens, keys)

    def advance_grammars(self, requests: Sequence[RunningRequest]) -> list[PalestraError | None]:
        """Compute the allowed next tokens of replies with a grammar; return an error for each that has none."""
        assert self._grammars is not None
        return self._grammars.advance([r.matcher for r in requests if r.matcher is not None])

    def load_weights(self, version: PolicyVersion, source: WeightSource) -> None:
        """Copy new weights into the model, all or none, and drop cached prefixes."""
        own = self.model.own_shapes()
        given = dict(source.tensors())
        for name, tensor in given.items():
            if own.get(name) != tensor.shape:
                raise ModelError(f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}")
        if missing := own.keys() - given.keys():
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        self.model.take_weights(given)
        self.version = version
        self.runner.refresh(self)
        self.prefixes.clear()


@dataclass(frozen=True, slots=True)
class Prefill:
    """A pass over chunks of prompts of one runner's policies."""

    runner: ModelRunner
    pieces: list[tuple[RunningRequest, int]]  # each with how many further tokens of its prompt


@dataclass(frozen=True, slots=True)
class Decode:
    """A pass that adds one token to every running reply of one runner's policies."""

    runner: ModelRunner
    requests: list[RunningRequest]


class Scheduler:
    """The queues of an engine, and the memory reserved by its requests."""

    def __init__(
        self, policies: Mapping[str, ServedPolicy], config: EmbeddedEngineConfig, deterministic: bool, kv_bytes: int
    ) -> None:
        """Create empty queues. `deterministic`: prompts are prefilled whole and alone. `kv_bytes` are for keys and
        values of all policies, cached prefixes included.
        """
        self._policies, self._config, self._deterministic = policies, config, deterministic
        self.budget = KVBudget(kv_bytes, prefixes=[(p.prefixes, p.model.token_bytes) for p in policies.values()])
        self.waiting: list[RunningRequest] = []
        self.prefilling: list[RunningRequest] = []  # of those with the same prompt only the first, which has the others
        self.running: list[RunningRequest] = []
        self.draining: set[str] = set()  # policies whose running replies new weights wait for: none are admitted

    def schedule(self) -> Iterator[Prefill | Decode]:
        """Yield the passes of one step; each is planned after the previous one was computed.

        First up to `PREFILL_TOKENS` of the prompts, then the next token of every running reply.
        """
        self._drop_cancelled()
        self._admit()
        yield from self._prefill()
        yield from self._decode()

    # What the engine asks.

    def add(self, request: RunningRequest) -> None:
        """Queue a new request; it begins when there is memory for it."""
        self.waiting.append(request)

    def add_policy(self, policy: ServedPolicy) -> None:
        """Include a policy's cached prefixes in the memory budget."""
        self.budget.prefixes = [*self.budget.prefixes, (policy.prefixes, policy.model.token_bytes)]

    def remove_policy(self, name: str, gone: ServedPolicy) -> None:
        """Drop a policy without requests."""
        self.budget.prefixes = [(cache, each) for cache, each in self.budget.prefixes if cache is not gone.prefixes]
        self.draining.discard(name)

    def has_begun(self, policy: str | None = None) -> bool:
        """Return whether any request has begun, of one policy or of all."""
        return any(policy in (None, r.policy) for queue in (self.prefilling, self.running) for r in queue)

    @property
    def idle(self) -> bool:
        """Return whether there is no work."""
        return not self.has_begun() and all(r.policy in self.draining for r in self.waiting)

    @property
    def begun(self) -> int:
        """Return the number of admitted requests: in prefill, with followers, or decoding."""
        return len(self.running) + sum(len(r.group) for r in self.prefilling)

    # Waiting to prefill.

    def _drop_cancelled(self) -> None:
        self.waiting = [r for r in self.waiting if not r.cancelled]
        for request in [r for r in self.running if r.cancelled]:
            self.finish(request)
        for request in self.prefilling:
            for follower in [f for f in request.followers if f.cancelled]:
                request.followers.remove(follower)
                self._release(follower)
        for request in [r for r in self.prefilling if r.cancelled]:
            self.prefilling.remove(request)
            self._release(request)
            if (heir := request.promote_follower()) is not None:
                self.prefilling.insert(0, heir)

    def _admit(self) -> None:
        """Begin waiting requests, the oldest first, while their longest replies fit into memory."""
        leaders = {_key(r): r for r in self.prefilling} if self.waiting else {}
        for request in [r for r in self.waiting if r.policy not in self.draining]:
            request.version = self._policies[request.policy].version
            try:
                key = _key(request)
                if self.begun >= self._config.max_batch or not self._reserve(request):
                    return
            except Exception as error:
                raise Unprepared(request, error) from error
            self.waiting.remove(request)
            leader = leaders.setdefault(key, request)
            if leader is request:
                self.prefilling.append(request)
            else:
                leader.followers.append(request)

    def _reserve(self, request: RunningRequest) -> bool:
        policy = self._policies[request.policy]
        each = policy.model.token_bytes
        wanted = min(policy.longest_bytes(request), self.budget.total // each * each)
        if not self.budget.reserve(wanted):
            return False
        request.reserved = wanted
        return True

    def _release(self, request: RunningRequest) -> None:
        self.budget.release(request.reserved)
        request.reserved = 0

    # Passes.

    def _prefill(self) -> Iterator[Prefill]:
        left = PREFILL_TOKENS
        if self.running and not self._deterministic:  # they wait for their next token
            left = min(left, PREFILL_CHUNK)
        while self.prefilling and left > 0:
            pieces = self._pieces(left)
            left -= sum(new for _, new in pieces)
            yield from self._by_runner(pieces)

    def _pieces(self, most: int) -> list[tuple[RunningRequest, int]]:
        """Return what to prefill next: at most `most` tokens of the oldest prompts, or the oldest prompt as a whole."""
        pieces: list[tuple[RunningRequest, int]] = []
        for request in self.prefilling[: 1 if self._deterministic else None]:
            if most <= 0:
                break
            if request.keys is None:
                try:
                    self._policies[request.policy].runner.allocate_prompt(request)
                except Exception as error:
                    raise Unprepared(request, error) from error
            new = request.remaining if self._deterministic else min(request.remaining, most)
            pieces.append((request, new))
            most -= new
        return pieces

    def _by_runner(self, pieces: list[tuple[RunningRequest, int]]) -> list[Prefill]:
        found: dict[ModelRunner, list[tuple[RunningRequest, int]]] = {}
        for piece in pieces:
            found.setdefault(self._policies[piece[0].policy].runner, []).append(piece)
        return [Prefill(runner, own) for runner, own in found.items()]

    def _decode(self) -> Iterator[Decode]:
        for runner in dict.fromkeys(policy.runner for policy in self._policies.values()):
            requests = [r for r in self.running if r.policy in runner.policies]
            if requests:
                yield Decode(runner, requests)

    # From prefill to decode, and out.

    def start(self, request: RunningRequest, leader: RunningRequest) -> None:
        """Move a request whose prompt is computed from prefill to decode. The prompt was computed for `leader`, which
        must start last of its group.
        """
        if request is leader:
            self.prefilling.remove(leader)
        else:
            leader.followers.remove(request)
        self.running.append(request)

    def keep_prefix(self, request: RunningRequest, tokens: TokenRun, keys: Tensor) -> None:
        """Cache what was computed for a request, unless its weights were replaced. `tokens` [N] are of its prompt and
        reply; `keys` are [layers, 2, key heads, N, head dim].
        """
        policy = self._policies[request.policy]
        if not self._deterministic and request.version == policy.version:
            policy.keep_prefix(tokens, keys, self.budget.room_for(policy.prefixes, policy.model.token_bytes))

    def finish(self, request: RunningRequest) -> None:
        """Remove a finished reply, and cache its keys and values for requests that continue it."""
        row = request.row
        assert row is not None
        reply = np.array(request.reply[: row.length - len(request.prompt)], np.int32)  # the last token is not computed
        keys = row.bucket.storage[:, :, row.index, :, : row.length]
        self.keep_prefix(request, request.prompt.followed_by(reply), keys)
        self.remove(request)

    def remove(self, request: RunningRequest) -> None:
        """Remove a request that has begun, with its followers, and release their memory."""
        for one in request.group:
            self._release(one)
        if request.row is None:
            for queue in (self.waiting, self.prefilling, *(leader.followers for leader in self.prefilling)):
                if request in queue:
                    queue.remove(request)
                    return
        else:
            self._policies[request.policy].runner.remove_row(request.row)
            request.row = None
            self.running.remove(request)

    def remove_all(self, policies: Collection[str]) -> list[RunningRequest]:
        """Remove and return all requests of some policies that have begun, with their keys and values."""
        removed = [r for queue in (self.running, self.prefilling) for r in queue if r.policy in policies]
        self.running = [r for r in self.running if r.policy not in policies]
        self.prefilling = [r for r in self.prefilling if r.policy not in policies]
        for runner in {self._policies[policy].runner for policy in policies}:
            if runner.policies.keys() <= set(policies):  # perhaps after a pass that has failed halfway
                runner.clear()
            else:
                for request in (r for r in removed if r.row is not None and r.policy in runner.policies):
                    assert request.row is not None
                    runner.remove_row(request.row)
        for policy in policies:
            self._policies[policy].prefixes.clear()
        removed = [one for request in removed for one in request.group]
        for request in removed:
            self._release(request)
        return removed


def _key(request: RunningRequest) -> tuple[object, ...]:
    """Return what two requests must have in common to share a prompt: its tokens and the weights."""
    return (request.policy, request.version, *request.prompt.key)
