"""Loading a decoder-only transformers model whose attention is computed by a function of ours.

All sequences of a batch lie flat, one after another, in one row: [1, N]. What is not attention then works on N rows
without any padding, and attention is left to an `Attend`, which knows where each sequence begins and what it may see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from palestra.errors import ModelError
from palestra.models.catalog import model_folder, quiet_transformers

_NAME = "palestra_flat"
_TRIAL_TOKENS = 12


class Attend(Protocol):
    """Attention over a flat batch."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[1, H, N, D] query and [1, K, N, D] key and value to [N, H, D]; head h reads key head h // (H // K).

        With a window a token sees itself and the `window - 1` tokens before it; None: all before it.
        """
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    slot: _Slot = module.palestra_slot  # type: ignore[assignment]
    assert slot.attend is not None, "the model was called without an Attend"
    if softcap is not None or s_aux is not None:
        raise ModelError("models with capped attention scores or attention sinks are not supported")
    if key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise ModelError(f"models with keys of {tuple(key.shape)} and values of {tuple(value.shape)} are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = slot.attend(module.layer_idx, query, key, value, scale, sliding_window)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _flat_attention)


class _Trial:
    """Plain causal attention of one sequence, which also sees what shape the keys have."""

    def __init__(self) -> None:
        self.shape = (0, 0)
        self.layers: set[int] = set()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Attend`."""
        self.shape = (key.shape[1], key.shape[3])
        self.layers.add(layer)
        seen = torch.ones((key.shape[2], key.shape[2]), dtype=torch.bool, device=key.device).tril()
        if window is not None:
            seen = seen.triu(diagonal=1 - window)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


class CausalLM:
    """A transformers model with flat batches.

    A model whose attention goes through transformers' attention interface is supported, if it is full or within a
    sliding window. Whether nothing of its arithmetic is lost is tried at once, on a few tokens.
    """

    def __init__(self, model: Any) -> None:
        """`model` is a causal language model of transformers, loaded with the attention that this module registers.

        Raises:
            ModelError: an architecture that flat batches don't support.
        """
        config = model.config
        self.model, self.config = model, config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 2**20
        self.layers: int = config.num_hidden_layers
        self._slot = _Slot()
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.palestra_slot = self._slot
        trial = _Trial()
        self._try(trial)
        self.key_heads, self.head_dim = trial.shape

    def _try(self, trial: _Trial) -> None:
        """Compare a flat forward pass with the model's own.

        Raises:
            ModelError: they differ, or the model can't be called this way.
        """
        device = next(iter(self.model.parameters())).device
        ids = torch.arange(_TRIAL_TOKENS, device=device) * 7919 % self.vocab_size
        try:
            with torch.inference_mode():
                flat = self.logits(self.hidden(ids, torch.arange(len(ids), device=device), trial)).float()
                self.config._attn_implementation = "sdpa"
                own = self.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self.config.model_type} models are not supported: {error}") from error
        finally:
            self.config._attn_implementation = _NAME
        difference = float((flat - own).norm() / own.norm().clamp_min(1e-6))
        if trial.layers != set(range(self.layers)):
            raise ModelError(f"{self.config.model_type} models are not supported: their attention can't be replaced")
        if not difference < (1e-3 if self.model.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{self.config.model_type} models are not supported: their own forward pass differs by {difference:.0%}"
            )

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
        config = self.config
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            out = out / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            out = out * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            out = torch.tanh(out / cap) * cap
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


def load_causal_lm(name: str, dtype: torch.dtype, device: torch.device | None = None) -> CausalLM:
    """Load by catalog name, folder, or Hugging Face name, onto a device; None: the CPU.

    Raises:
        ModelError: missing weights, or an architecture that flat batches don't support.
    """
    folder = model_folder(name)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_NAME)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {name!r} can't be loaded: {str(error).splitlines()[0]}") from error
    return CausalLM(model.eval().to(device or torch.device("cpu")))


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
