"""Loading a decoder-only transformers model whose attention is computed by a function of ours.

All sequences of a batch lie flat, one after another, in one row: [1, N]. What is not attention then works on N rows
without any padding, and attention is left to an `AttentionBackend`, which knows where each sequence begins and what its
tokens may see.

The engine and the trainer share this forward pass, so that both round at the same places. In bfloat16 the inputs and
outputs of matrix products are rounded, and keys, values and embeddings; norms, rotary embedding and the sum of the
residual stream are float32, and so are the logits of the `EXACT_LOGITS` most probable tokens.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from palestra.errors import ModelError
from palestra.models.catalog import model_folder, quiet_transformers

_NAME = "palestra_flat"
_TRIAL_TOKENS = 12
# A logit of 16 to 32 is rounded to a multiple of 1/8 in bfloat16, which moves logprobs as far as all layers do. A head
# in float32 (MiniMax 2025, "MiniMax-M1", section 3.2) would make decoding on a CPU a fifth slower; computing the logits
# of the most probable tokens again costs 4 % (64 would cost 8 %), and has all but the tail of the distribution.
EXACT_LOGITS = 16
_EXACT_ROWS = 64  # positions whose weights of the head, [rows, EXACT_LOGITS, hidden], exist at the same time


class AttentionBackend(Protocol):
    """Computes attention over a flat batch."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return what each query head of each token attends to, [N, H, D]; head h reads key head h // (H // K).

        Args:
            layer: number of the layer that asks.
            query: [1, H, N, D].
            key: [1, K, N, D].
            value: [1, K, N, D].
            scale: factor of the scores.
            window: a token sees itself and the `window - 1` tokens before it; None: all before it.
        """
        ...


class _Slot:
    """Where the attention modules of one model find the function for the forward pass that is running."""

    attention: AttentionBackend | None = None


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
    assert slot.attention is not None, "the model was called without an AttentionBackend"
    if softcap is not None or s_aux is not None:
        raise ModelError("models with capped attention scores or attention sinks are not supported")
    if key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise ModelError(f"models with keys of {tuple(key.shape)} and values of {tuple(value.shape)} are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Rotary embedding in float32 leaves queries and keys in float32, and values have the precision of their product.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = slot.attention(module.layer_idx, query, key, value, scale, sliding_window)  # type: ignore[arg-type]
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
        """See `AttentionBackend`."""
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

        It computes in the precision of its matrices until `compute_in` changes that. Parameters with one dimension
        (of norms, biases) are converted to float32 in place.

        Raises:
            ModelError: an architecture that flat batches don't support.
        """
        config = model.config
        self.model, self.config = model, config
        self.compute_dtype: torch.dtype = model.dtype
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.data = parameter.data.float()
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # of tokens, and of positions
                module.register_forward_hook(lambda _module, _inputs, out: self._embedded(out))
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
        device = self.device
        ids = torch.arange(_TRIAL_TOKENS, device=device) * 7919 % self.vocab_size
        try:
            with torch.inference_mode():
                flat = self.logits(self.hidden(ids, torch.arange(len(ids), device=device), trial)).float()
                self.config._attn_implementation = "sdpa"
                with self._autocast(device):
                    own = self.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self.config.model_type} models are not supported: {error}") from error
        finally:
            self.config._attn_implementation = _NAME
        difference = float((flat - own).norm() / own.norm().clamp_min(1e-6))
        if trial.layers != set(range(self.layers)):
            raise ModelError(f"{self.config.model_type} models are not supported: their attention can't be replaced")
        if not difference < (1e-3 if self.compute_dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{self.config.model_type} models are not supported: their own forward pass differs by {difference:.0%}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.layers * 2 * self.key_heads * self.head_dim * self.compute_dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        found: torch.device = next(iter(self.model.parameters())).device
        return found

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in another precision than that of the matrices: a trainer's are float32, for small updates."""
        self.compute_dtype = dtype

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Round the inputs of products to the compute precision; without it where that is float32."""
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    def _embedded(self, out: Tensor) -> Tensor:
        """Begin the residual stream: float32, with values that the compute precision has."""
        return out if self.compute_dtype == torch.float32 else out.to(self.compute_dtype).float()

    def hidden(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Return the last layer's normalised output, [N, hidden] float32.

        Args:
            ids: [N] token ids, all sequences one after another.
            positions: [N], of each token within its sequence.
            attention: knows which tokens see each other.
        """
        self._slot.attention = attention
        try:
            with self._autocast(ids.device):
                out = self.model.base_model(
                    input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
                )
        finally:
            self._slot.attention = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] to [M, vocabulary] float32.

        In bfloat16 the `EXACT_LOGITS` largest of each row are not rounded; their gradient is that of the product.
        """
        head = self.model.get_output_embeddings()
        with self._autocast(hidden.device):
            out: Tensor = head(hidden).float()
        if self.compute_dtype != torch.float32 and isinstance(head, nn.Linear):
            out = _sharpened(out, hidden, head, self.compute_dtype)
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


def _sharpened(logits: Tensor, hidden: Tensor, head: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Replace, in place, the largest logits of each row, [M, V], by those of a float32 product with rounded weights."""
    bias = dict(head.named_parameters()).get("bias")
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        largest = logits.topk(min(EXACT_LOGITS, logits.shape[1]), dim=-1).indices
        pieces = []
        for rows, tokens in zip(
            torch.split(hidden.float(), _EXACT_ROWS), torch.split(largest, _EXACT_ROWS), strict=True
        ):
            exact = (head.weight[tokens].to(dtype).float() * rows.unsqueeze(1)).sum(dim=-1)
            pieces.append(exact if bias is None else exact + bias[tokens].float())
        lacking = torch.cat(pieces) - logits.gather(1, largest) if pieces else logits.new_zeros(largest.shape)
    return logits.scatter_add_(1, largest, lacking)


def load_causal_lm(name: str, dtype: torch.dtype, device: torch.device | None = None) -> CausalLM:
    """Load by catalog name, folder, or Hugging Face name, onto a device; None: the CPU.

    Args:
        name: of the model.
        dtype: of its matrices.
        device: where its parameters are.

    Raises:
        ModelError: missing weights, or an architecture that flat batches don't support.
    """
    folder = model_folder(name)
    try:
        with quiet_transformers():
            # Parameters with one dimension stay float32 and must not be rounded on the way; a checkpoint that is
            # rounded already is read as it is, which takes half the memory.
            rounded = AutoConfig.from_pretrained(folder).dtype == dtype
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype if rounded else torch.float32, attn_implementation=_NAME
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {name!r} can't be loaded: {str(error).splitlines()[0]}") from error
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
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
