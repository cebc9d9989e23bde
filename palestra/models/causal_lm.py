"""Loads a decoder-only transformers model whose attention is computed by an `AttentionBackend`.

All sequences of a batch are concatenated into one row, [1, N], so everything except attention works on N tokens without
padding. The backend knows where each sequence begins and which tokens may attend to each other.

Engine and trainer share this forward pass, so that both round at the same points. In bfloat16, the inputs and outputs
of matrix products are rounded, as are keys, values and embeddings. Norms, rotary embedding, the residual stream and the
`EXACT_LOGITS` largest logits are float32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from palestra.config import AdapterConfig
from palestra.errors import ModelError
from palestra.models.adapter_files import read_adapter, saved_adapter, tokenizer_source, write_adapter
from palestra.models.adapters import Adapter, merge
from palestra.models.attention_backend import AttentionBackend, AttentionSlot, TrialAttention, recomputed
from palestra.models.catalog import model_folder
from palestra.models.kernels import kernels
from palestra.models.output_head import Correction, HeadWeights, RoundedHead, is_adapted, is_called_as_it_is, sharpened
from palestra.models.quiet import NO_CODE, NO_PICKLE, as_model_error, quiet_transformers
from palestra.models.vision.processor import has_vision
from palestra.models.vision.vision import PictureRows, PlacedPicture, Vision, load_vision_model
from palestra.types.calls import TokenSequence

if TYPE_CHECKING:
    from palestra.models.kernels import PackedWeights
    from palestra.models.loading import PartedFiles

FLAT_ATTENTION = "palestra_flat"  # name under which transformers knows `_flat_attention`
_TRIAL_TOKENS = 12


def _flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Call the backend in the module's slot: the attention function that this module registers with transformers."""
    slot: AttentionSlot = module.palestra_slot  # type: ignore[assignment]
    assert slot.attention is not None, "the model was called without an AttentionBackend"
    if any(more.get(name) is not None for name in ("softcap", "s_aux")):
        raise ModelError("models with capped attention scores or attention sinks are not supported")
    if key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise ModelError(f"models with keys of {tuple(key.shape)} and values of {tuple(value.shape)} are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Rotary embedding in float32 leaves queries and keys in float32, and values have the precision of their product.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = slot.attention(module.layer_idx, query, key, value, scale, sliding_window)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(FLAT_ATTENTION, _flat_attention)


def _replaced(embedded: Tensor, pictures: PictureRows) -> dict[str, Any]:
    """Return the inputs of a transformers text model in place of ids, for a batch with pictures."""
    first, *further = torch.split(pictures.values.to(embedded.dtype), embedded.shape[1], dim=1)
    given: dict[str, Any] = {"inputs_embeds": embedded.index_copy(0, pictures.rows, first).unsqueeze(0)}
    if further:
        places = torch.zeros(len(embedded), dtype=torch.bool, device=embedded.device)
        places[pictures.rows] = True  # the rows are in order, and so are the values
        given |= {"visual_pos_masks": places.unsqueeze(0), "deepstack_visual_embeds": further}
    return given


class CausalLM:
    """A transformers model that computes flat batches, with attention by an `AttentionBackend`.

    It supports every model that uses transformers' attention interface, with full attention or a sliding window. The
    constructor compares a flat forward pass over a few tokens with the model's own pass: a model that computed
    something else would be trained wrongly without any error.

    Attributes:
        model, config: the transformers model, and the configuration of its text model.
        max_positions: context length in tokens.
        layers, key_heads, head_dim: determine the size of a key-value cache.
        vision: its vision tower and picture source; None: a text-only model.
        adapter: its low-rank matrices; None: no adapter.
        packed: its matrices in a layout for sampling only, see `Kernels.pack`; None: plain matrices.
        unread: files that still hold its weights, see `load_parted`; None: they are loaded.
    """

    adapter: Adapter | None = None
    packed: PackedWeights | None = None
    _owner: CausalLM | None = None  # whose weights these are; None: its own

    def __init__(self, model: Any, vision: Vision | None = None, unread: PartedFiles | None = None) -> None:
        """Wrap a transformers model and check a flat forward pass, unless its weights are not loaded yet.

        It computes in the precision of the model's matrices until `compute_in` changes that. One-dimensional parameters
        (norms, biases) are converted to float32 in place. The model was loaded with the attention that this module
        registers, which only the text model of a vision-language model uses. With `unread` weights, call `try_out`
        after loading them.
        """
        text = model if vision is None else vision.tower.text
        config = text.config
        self.model, self.config, self.vision, self.unread = model, config, vision, unread
        self.compute_dtype: torch.dtype = model.dtype
        for parameter in model.parameters():
            if parameter.ndim < 2:
                # A copy even of float32: a view into the mapped file would keep all of the file in memory.
                parameter.data = parameter.data.to(torch.float32, copy=True)
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # of tokens, and of positions
                module.register_forward_hook(self._embedded)  # a method, so that a copy of the model calls its own
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 2**20
        self.layers: int = config.num_hidden_layers
        self._slot = AttentionSlot()
        for module in text.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.palestra_slot = self._slot
        if unread is None:
            self.try_out()
            if self.device.type == "cpu":  # of parts of weights, transformers' own layers know where the others are
                kernels().shorten_layers(text)

    def try_out(self) -> None:
        """Compare a flat forward pass of a few tokens with the model's own forward pass."""
        device, trial = self.device, TrialAttention()  # which records the layers that call it
        ids = self._trial_ids()
        try:
            with torch.no_grad():
                flat = self.trial_logits(trial)
                self.config._attn_implementation = "sdpa"
                with self._autocast(device):
                    own = self.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self.config.model_type} models are not supported: {error}") from error
        finally:
            self.config._attn_implementation = FLAT_ATTENTION
        difference = float((flat - own).norm() / own.norm().clamp_min(1e-6))
        if trial.layers != set(range(self.layers)):
            raise ModelError(f"{self.config.model_type} models are not supported: their attention can't be replaced")
        if not difference < (1e-3 if self.compute_dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{self.config.model_type} models are not supported: their own forward pass differs by {difference:.0%}"
            )
        self.key_heads, self.head_dim = trial.shape

    def _trial_ids(self) -> Tensor:
        """Return the token ids of a trial, [T]."""
        return torch.arange(_TRIAL_TOKENS, device=self.device) * 7919 % self.vocab_size

    def trial_logits(self, attention: AttentionBackend | None = None) -> Tensor:
        """Return the logits of a few fixed tokens, float32 [T, V]. Without `attention` it is causal."""
        ids = self._trial_ids()
        with torch.no_grad():  # not in inference mode, whose tensors FSDP could not use again in a pass with a gradient
            return self.logits(
                self.hidden(ids, torch.arange(len(ids), device=self.device), attention or TrialAttention())
            )

    @property
    def _text(self) -> Any:
        """Return the part of the transformers model that reads tokens, without the head."""
        return self.model.base_model if self.vision is None else self.vision.tower.text

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the decoder layers in order."""
        for module in self._text.modules():  # not of a tower, which may have as many layers
            if isinstance(module, nn.ModuleList) and len(module) == self.layers:
                return list(module)
        raise ModelError(f"{self.config.model_type} models have no list of {self.layers} layers")

    def share_out(self) -> None:
        """Make transformers' own modules compute all layers, because ranks gather their weights."""
        self._slot.shared_out = True

    def recompute_blocks(self) -> None:
        """Enable activation checkpointing for each decoder layer: less memory, and about a third more time per step."""
        for block in self.blocks:
            block.forward = recomputed(block.forward, self._slot)

    @property
    def token_bytes(self) -> int:
        """Return the bytes that the keys and values of one token take in a cache."""
        return self.layers * 2 * self.key_heads * self.head_dim * self.compute_dtype.itemsize

    @property
    def base(self) -> CausalLM | None:
        """Return the model whose weights this one shares; None: it has its own."""
        return self._owner

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        found: torch.device = next(iter(self.model.parameters())).device
        return found

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the precision of matrix products.

        A trainer keeps float32 matrices for small updates and computes in bfloat16.
        """
        self.compute_dtype = dtype

    def round_to(self, dtype: torch.dtype) -> None:
        """Round all weights with two dimensions or more, and compute in that precision, for frozen weights.

        Products round a float32 model's weights to the same numbers anyway, so only the memory changes.
        """
        for parameter in self.model.parameters():
            if parameter.ndim >= 2:
                parameter.data = parameter.data.to(dtype)
        self.compute_in(dtype)

    def on_same_weights(self) -> CausalLM:
        """Return a model that shares these weights; no pass of this one may be running.

        Each has its own layers, so both may run passes at the same time, and either may get an adapter.
        """
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        made = copy.deepcopy(self, shared | self._pictures())
        made._owner = self
        return made

    def copied(self) -> CausalLM:
        """Return a copy with its own trainable weights; frozen weights are shared."""
        own = {id(weight) for _, weight in self.own_parameters()}
        kept = (*self.model.parameters(), *self.model.buffers())
        shared: dict[int, Any] = {id(tensor): tensor for tensor in kept if id(tensor) not in own}
        made = copy.deepcopy(self, shared | self._pictures())
        made._owner = self._owner
        return made

    def _pictures(self) -> dict[int, Any]:
        """Return the picture source, which copies of this model share."""
        pictures = None if self.vision is None else self.vision.pictures
        return {} if pictures is None else {id(pictures): pictures}

    def free_adapter(self) -> None:
        """Free the adapter's matrices now, if there is one; the model is unusable afterwards.

        Hooks make the model part of a reference cycle, and the garbage collector may run only after dozens of other
        adapters were loaded.
        """
        for _, weight in () if self.adapter is None else self.adapter.named_parameters():
            weight.data = weight.data.new_empty(0)

    def add_adapter(self, config: AdapterConfig, base: str, layers: Collection[str] | None = None) -> Adapter:
        """Add an adapter, see `Adapter`; the base's weights are shared and frozen."""
        assert self._owner is not None
        self.adapter = Adapter(self.model, config, base, layers)
        return self.adapter

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return a context that rounds inputs of matrix products to the compute precision; float32 rounds nothing."""
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    def _embedded(self, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        """Round embeddings, [1, N, hidden], to the compute precision, and return them in float32."""
        return out if self.compute_dtype == torch.float32 else out.to(self.compute_dtype).float()

    def picture_rows(self, pictures: Sequence[tuple[PlacedPicture, NDArray[np.int64]]]) -> PictureRows | None:
        """Return the embeddings of pictures for rows of a flat batch; see `Vision.rows`. Each picture comes with the
        rows [F] of its placeholders.
        """
        if not pictures:
            return None
        if self.vision is None:
            raise ModelError(f"{self.config.model_type} models read text only, and there is a picture")
        with self._autocast(self.device):
            return self.vision.rows(pictures)

    def positions(self, sequence: TokenSequence) -> Tensor:
        """Return the positions of a sequence's tokens: int64 [N], or [3, N] for models with 2D picture positions."""
        if self.vision is None or not sequence.media:
            return torch.arange(len(sequence.ids))
        return self.vision.positions(*sequence)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        pictures: PictureRows | None = None,
        weights: HeadWeights | None = None,
    ) -> Tensor:
        """Return the last layer's normalised output, float32 [N, hidden].

        `ids` [N] are all sequences, concatenated; `positions` are [N], within each sequence, or [3, N]. `pictures`
        replace the embeddings of some tokens. With the result of `head_weights`, tied embeddings share it; otherwise
        autograd keeps both gradients separately.
        """
        text = self._text
        self._slot.attention = attention
        try:
            with self._autocast(ids.device):
                given: dict[str, Any] = {"input_ids": ids.unsqueeze(0)}
                if pictures is not None:
                    given = _replaced(text.get_input_embeddings()(ids), pictures)
                given |= {"position_ids": positions.unsqueeze(-2), "use_cache": False}
                out = text(**given) if weights is None else weights.call(text, given)
        finally:
            self._slot.clear()
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def head_weights(self) -> HeadWeights | None:
        """Return the output layer's weights for a pass with a `RoundedHead`; None: `logits` must call the module."""
        head: Any = self.model.get_output_embeddings()
        plain = type(head) is nn.Linear and getattr(head, "bias", None) is None and head.weight.dtype == torch.float32
        own = self.packed is None and not self._slot.shared_out and self.compute_dtype == torch.bfloat16
        return HeadWeights(head) if plain and own and is_called_as_it_is(head) else None

    def logits(
        self, hidden: Tensor, corrections: list[Correction] | None = None, rounded: RoundedHead | None = None
    ) -> Tensor:
        """Return the logits, float32 [M, V], of hidden states [M, hidden].

        In bfloat16 the `EXACT_LOGITS` largest of each row are computed in float32; their gradient is the product's.
        `corrections` are reused when the same logits are recomputed; `rounded` replaces the model's own output layer.
        """
        head = self.model.get_output_embeddings()
        with self._autocast(hidden.device):
            out: Tensor = (rounded or head)(hidden) if self.packed is None else self.packed.scores(hidden)
            out = out.float()
        if self.compute_dtype != torch.float32 and (isinstance(head, nn.Linear) or is_adapted(head)):
            out = sharpened(out, hidden, head, self.compute_dtype, corrections)
        config = self.config
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            out = out / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            out = out * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            out = torch.tanh(out / cap) * cap
        return out

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each weight once with its name, tied weights under their first name, always in the same order."""
        return list(self.model.named_parameters())

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable weights: the adapter's, or all if none is shared; see `named_parameters`."""
        if self.adapter is not None:
            return self.adapter.named_parameters()
        if self._owner is not None:
            return []
        return self._changing(self.named_parameters())

    def saved_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the weights that `save` writes: the adapter's, or all, including frozen ones; see
        `named_parameters`.
        """
        return self.named_parameters() if self.adapter is None else self.adapter.named_parameters()

    def own_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the trainable weights by name, packed or not."""
        plain = {name: weight.shape for name, weight in self.own_parameters()}
        return plain if self.packed is None else plain | self.packed.shapes()

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trainable weights with their names, [n, d] or [d]; packed ones are unpacked one by one."""
        yield from self.own_parameters()
        if self.packed is not None:
            yield from self.packed.weights()

    def take_weights(self, given: Mapping[str, Tensor]) -> None:
        """Copy new weights into the model, and pack them again where it is packed. Tensors are [n, d] or [d], with the
        names and shapes of `own_shapes`.
        """
        for name, parameter in self.own_parameters():
            parameter.copy_(given[name])
        if self.vision is not None and self.vision.trained and self.vision.kept is not None:
            self.vision.kept.clear()
        if self.packed is not None:
            self.packed.take(given)

    def body_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable weights that affect the last hidden states: all except the head's."""
        if self.adapter is not None:
            return self.adapter.body_parameters()
        body = list(self.model.base_model.named_parameters())
        return self._changing(body, f"{self.model.base_model_prefix}.")

    def _changing(self, named: list[tuple[str, nn.Parameter]], prefix: str = "") -> list[tuple[str, nn.Parameter]]:
        """Return weights without those of a frozen vision tower; `prefix` is missing from their names."""
        if self.vision is None or self.vision.trained:
            return named
        return [(name, weight) for name, weight in named if not self.vision.owns(prefix + name)]

    def save(self, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write trainable weights, configuration and tokenizer into an existing folder, loadable by Hugging Face's
        libraries.

        `weights` [n, d] or [d], named as by `saved_parameters`, replace the model's own if this process has only parts
        of them.
        """
        tokenizer.save_pretrained(folder)
        if self.adapter is not None:
            write_adapter(folder, self.adapter, weights)
            return
        with quiet_transformers():
            self.config._attn_implementation = "sdpa"
            try:
                self.model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
            finally:
                self.config._attn_implementation = FLAT_ATTENTION
        for name, content in ({} if self.vision is None else self.vision.processor.files).items():
            (folder / name).write_bytes(content)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that `save` wrote, [n, d] or [d] by the names of `saved_parameters`, on the CPU."""
        if self.adapter is not None:
            return read_adapter(folder).weights
        files = sorted(folder.glob("model*.safetensors"))
        return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def load_causal_lm(name: str, dtype: torch.dtype, device: torch.device | None = None) -> CausalLM:
    """Load a model's weights onto a device. `name` is a catalog name, a folder, or a Hugging Face name; an adapter's
    folder is merged into its base. Weights with fewer than two dimensions are float32.
    """
    adapter = saved_adapter(name)
    folder = model_folder(name if adapter is None else adapter.base)
    with as_model_error(f"model {name!r} can't be loaded"), quiet_transformers():
        # Parameters with one dimension stay float32 and must not be rounded on the way; a checkpoint that is
        # rounded already is read as it is, which takes half the memory.
        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        read_as = dtype if adapter is None and config.dtype == dtype else torch.float32
        if has_vision(config):
            model, vision = load_vision_model(folder, read_as, FLAT_ATTENTION)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=read_as, attn_implementation=FLAT_ATTENTION, **NO_PICKLE
            )
            vision = None
    if adapter is not None and vision is not None:
        raise ModelError(f"model {name!r} is an adapter of a model that sees, which is not supported")
    if adapter is not None:
        merge(model, adapter.weights, adapter.config.scale)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
    return CausalLM(model.eval().to(device or torch.device("cpu")), vision)


def check_architecture(folder: Path) -> None:
    """Raise ModelError for a model that transformers cannot load for a trainer, from its configuration alone.

    Features that only show in a pass, such as capped logits, are detected when the model is loaded.
    """
    with as_model_error(f"the model in {folder} can't be trained"), quiet_transformers(), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        if not has_vision(config):
            AutoModelForCausalLM.from_config(config, attn_implementation=FLAT_ATTENTION, **NO_CODE)


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer, which must have a chat template."""
    folder = model_folder(tokenizer_source(name))
    with as_model_error(f"the tokenizer of {name!r} can't be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"the tokenizer of {name!r} has no chat template; use an instruction-tuned model")
    return tokenizer
