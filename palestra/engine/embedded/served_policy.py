"""One policy of an engine: its weights, their version, and its cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.engine.embedded.request import RunningRequest
from palestra.errors import ModelError, PalestraError
from palestra.models.weights import WeightSource
from palestra.tokens import TokenRun
from palestra.types.calls import PolicyVersion

if TYPE_CHECKING:
    from palestra.engine.embedded.model_runner import ModelRunner, PolicyModel


class ServedPolicy:
    """A policy that an engine samples from.

    Attributes:
        stops: tokens that end its replies.
        prefixes: keys and values computed by its present weights.
        runner: computes its passes, perhaps together with policies on the same base.
    """

    def __init__(self, policy: PolicyModel, version: PolicyVersion, prefix_tokens: int, runner: ModelRunner) -> None:
        """Take over a policy's model.

        Args:
            prefix_tokens: limit of its cached prefixes, in tokens.
        """
        self.model, self.stops, self._grammars = policy.model, policy.stop_ids, policy.grammars
        self.version, self.runner = version, runner
        self.prefixes = PrefixCache(prefix_tokens)
        self._prefix_tokens = prefix_tokens

    def longest_bytes(self, request: RunningRequest) -> int:
        """Return the key-value bytes of a request's longest possible reply."""
        length = len(request.prompt)
        longest = min(length + request.sampling.max_tokens, self.model.max_positions)
        return self.runner.capacity(max(longest, length + 1)) * self.model.token_bytes

    def keep_prefix(self, tokens: TokenRun, keys: Tensor, room: int) -> None:
        """Cache keys and values.

        Args:
            tokens: [N].
            keys: [layers, 2, key heads, N, head dim].
            room: limit of the policy's cached prefixes, in tokens.
        """
        self.prefixes.capacity = min(self._prefix_tokens, room)
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
