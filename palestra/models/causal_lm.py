"""Loading a decoder-only transformers model whose attention is computed by a function of ours.

All sequences of a batch lie flat, one after another, in one row: [1, N]. What is not attention then works on N rows
without any padding, and attention is left to an `Attend`, which knows where each sequence begins and what it may see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from palestra.errors import ModelError
from palestra.models.catalog import model_folder, quiet_transformers

_NAME = "palestra_flat"
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "attention_chunk_size",
)


class Attend(Protocol):
    """Attention over a flat batch."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[1, H, N, D] query and [1, K, N, D] key and value to [N, H, D]; head h reads key head h // (H // K)."""
        ...


class _Slot:
    """Where the attention modules of one model find the function for the forward pass that is running."""

    attend: Attend | None = None


def _flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    slot: _Slot = module.palestra_slot  # type: ignore[assignment]
    assert slot.attend is not None, "the model was called without an Attend"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = slot.attend(module.layer_idx, query, key, value, scale)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _flat_attention)


class CausalLM:
    """A transformers model with flat batches."""

    def __init__(self, model: Any) -> None:
        config = model.config
        for name in _UNSUPPORTED:
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise ModelError(f"{config.model_type} models with {name} are not supported")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        sliding = getattr(config, "use_sliding_window", getattr(config, "sliding_window", None) is not None)
        if kinds != {"full_attention"} or (sliding and getattr(config, "sliding_window", None)):
            raise ModelError(f"{config.model_type} models with other than full attention are not supported")
        self.model, self.config = model, config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 2**20
        self.layers: int = config.num_hidden_layers
        self.key_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._slot = _Slot()
        found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
        if len(found) != self.layers:
            raise ModelError(f"{config.model_type}: {len(found)} attention modules found in {self.layers} layers")
        for module in found:
            module.palestra_slot = self._slot

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[N] token ids and positions to the last layer's normalised output, [N, hidden]."""
        self._slot.attend = attend
        try:
            out = self.model.base_model(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        finally:
            self._slot.attend = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] to [M, vocabulary], in the compute precision."""
        out: Tensor = self.model.get_output_embeddings()(hidden)
        return out

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Each weight once, tied ones under their first name, always in the same order."""
        return list(self.model.named_parameters())

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write Hugging Face's layout."""
        with quiet_transformers():
            self.model.config._attn_implementation = "sdpa"
            try:
                self.model.save_pretrained(folder)
            finally:
                self.model.config._attn_implementation = _NAME
        tokenizer.save_pretrained(folder)


def load_causal_lm(name: str, dtype: torch.dtype) -> CausalLM:
    """Load by catalog name, folder, or Hugging Face name.

    Raises:
        ModelError: missing weights, or an architecture that flat batches don't support.
    """
    folder = model_folder(name)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_NAME)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {name!r} can't be loaded: {str(error).splitlines()[0]}") from error
    model.eval()
    return CausalLM(model)


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: it can't be loaded, or has no chat template.
    """
    folder = model_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer of {name!r} can't be loaded: {str(error).splitlines()[0]}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"the tokenizer of {name!r} has no chat template; use an instruction-tuned model")
    return tokenizer


def set_threads(threads: int | None) -> None:
    """Arithmetic threads of the calling thread; None: leave them."""
    if threads is not None:
        torch.set_num_threads(threads)
