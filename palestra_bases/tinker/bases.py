"""The loaded base models of a Tinker server, and the layers that adapters may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.config import ALL_LINEAR, AdapterConfig
from palestra.errors import InvalidRequest, NotFound

ALPHA = 32.0  # of every adapter: the API has no key for it, and its documentation names this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A frozen model.

    Attributes:
        name: from clients: a built-in name, a folder, or a name of the hub.
        policy: the engine's policy of the model itself.
        tokenizer_id: from which a client loads the tokenizer.
        max_context: largest number of tokens in prompt and reply together, or in a datum's input and its last target.
    """

    name: str
    policy: str
    tokenizer_id: str
    tokenizer: Any
    architecture: str
    vocab_size: int
    max_context: int
    layers: tuple[str, ...]
    head: str | None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        found = self.tokenizer.eos_token_id
        return () if found is None else (int(found),)

    def adapter(self, rank: int, attention: bool, mlp: bool, unembed: bool) -> AdapterConfig:
        """Return the configuration of an adapter.

        Args:
            attention: whether to adapt attention layers.
            mlp: whether to adapt all other linear layers except the head.
            unembed: whether to adapt the head; the API has no key for the embedding.
        """
        if rank < 1:
            raise InvalidRequest(f"lora_config.rank is {rank}, and has to be at least 1", "lora_config.rank")
        head = [self.head] if unembed and self.head is not None else []
        if attention and mlp:
            targets = [ALL_LINEAR, *head]
        else:
            chosen = [name for name in self.layers if attention == _is_attention(name) and (attention or mlp)]
            targets = [*(_short(chosen, self.layers) if chosen else []), *head]
        if not targets:
            raise InvalidRequest(
                f"no layer of {self.name} is left for the adapter: at least one of train_attn, train_mlp and "
                "train_unembed has to be true",
                "lora_config",
            )
        return AdapterConfig(rank=rank, alpha=ALPHA, targets=targets)


class Bases(dict[str, Base]):
    """The base models of one server, by name, in the order in which they were named."""

    def of(self, name: str) -> Base:
        """Return a model by name."""
        found = self.get(name)
        if found is None:
            raise NotFound(f"the model {name!r} is not served here; there are {', '.join(map(repr, self))}")
        return found


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])


def _short(chosen: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the last parts of names, or all of them if other layers have the same last parts."""
    last = sorted({name.rpartition(".")[2] for name in chosen})
    same = [name for name in layers if name.rpartition(".")[2] in last]
    return last if len(same) == len(chosen) else list(chosen)
