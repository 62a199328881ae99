"""How fused processors call attention: one function for all models, one policy for backends and masks.

Diffusers' dispatcher chooses the backend. Many of its stock processors call PyTorch directly, so that a chosen backend
has no effect on them. All fused processors call `attend`.

Shapes: B batch, S query tokens, K key tokens, R rotated tokens, H heads, D head width.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit_lora.errors import DitLoraError, format_list
from dit_lora.fuse.lora import has_module_or_global_hooks, is_hooked, project_linear_layers
from dit_lora.fuse.patches import ATTENTION, FusedModelState, ProcessorPatch
from dit_lora.numerics.attention_calls import attention_call
from dit_lora.numerics.opaque import COUNTS_ONLY
from dit_lora_kernels.qk_norm_rope import qk_norm_rope, recoverable

RotaryTables = tuple[torch.Tensor, torch.Tensor]
"""Tables of cosines and sines, as a model's own code makes them."""
QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""
NormKind = Literal["layer", "rms"]

TRAINABLE_BACKENDS = (
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flash_hub",
    "flash_4_hub",
    "_flash_3_hub",
    "flex",
    "xformers",
)
"""Diffusers' backends that have a backward. Sage and aiter are for inference; `_flash_3` lost its backward
(docs/kernels.md)."""
MASKLESS_BACKENDS = ("_native_flash", "flash", "flash_hub", "flash_4_hub", "_flash_3_hub")
"""Backends in `TRAINABLE_BACKENDS` that take no mask."""


def require_backend(name: str) -> str:
    """Check that Diffusers can train with this attention backend here, and return its name.

    Raises:
        DitLoraError: The backend does not support training, or a package or device for it is missing.
    """
    # Private: Diffusers asks these when a backend is set, and only then says what is missing.
    from diffusers.models.attention_dispatch import (
        _check_attention_backend_requirements,
        _maybe_download_kernel_for_backend,
    )

    if name not in TRAINABLE_BACKENDS:
        raise DitLoraError(
            format_list(f"kernels.attention: {name} does not support training; choose one of", TRAINABLE_BACKENDS)
        )
    backend = AttentionBackendName(name)
    try:
        _check_attention_backend_requirements(backend)
        _maybe_download_kernel_for_backend(backend)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise DitLoraError(f"kernels.attention: {name} cannot be used here: {error}") from error
    return name


def require_mask_support(name: str) -> None:
    """Raise `DitLoraError` if this attention backend does not support masks."""
    if name in MASKLESS_BACKENDS:
        raise DitLoraError(f"kernels.attention: {name} does not support masks, which this model needs; use auto")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    backend: str | None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """Softmax attention of (B, S, H, D) over (B, K, H, D), as (B, S, H, D).

    Args:
        query: (B, S, H, D).
        key: (B, K, H, D).
        value: (B, K, H, D).
        mask: A mask as PyTorch's `scaled_dot_product_attention` takes it, or None. With a mask cuDNN is never used,
            because its backward can give NaN (pytorch issue 196678).
        backend: Diffusers' name of the attention backend; None for PyTorch's choice.
        parallel_config: Diffusers' configuration of ranks that share a sample, each with its S and K tokens; None
            without.

    Raises:
        DitLoraError: There is a mask and `backend` does not support masks.
    """
    # Private: what `attention_backend` and Diffusers' environment variables set has no public reader.
    if mask is None and parallel_config is None and not Registry._checks_enabled:
        active_backend: str = Registry._active_backend if backend is None else backend
        # The dispatcher would only call PyTorch's attention: a direct call saves half of the call's host time.
        if active_backend == AttentionBackendName.NATIVE.value:
            with attention_call():
                query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
                return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    name = None if backend is None else AttentionBackendName(backend)
    # The dispatcher takes heads behind tokens, as projections and the kernel of q and k leave them: nothing is moved.
    options: Any = {"attn_mask": mask, "backend": name, "parallel_config": parallel_config}
    dispatch = partial(dispatch_attention_fn, query, key, value, **options)
    if mask is not None and backend is not None:
        require_mask_support(backend)
    if mask is None or not mask.is_cuda:
        with attention_call():
            return dispatch()
    # Dynamo knows `sdpa_kernel` and none of the functions that ask or set one backend.
    with sdpa_kernel([_MASK_BACKENDS[i] for i in _find_enabled_backends()]), attention_call():
        return dispatch()


_MASK_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""PyTorch's backends that `attend` uses with a mask."""


@torch.compiler.assume_constant_result
def _find_enabled_backends() -> tuple[int, ...]:
    """Indices into `_MASK_BACKENDS` of PyTorch's attention backends that are enabled.

    Backends that the guard switched off stay off. Compiled code treats the result as a constant. A fallback of the
    guard resets Dynamo, which also resets this value.
    """
    enabled_flags = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return tuple(index for index, enabled in enumerate(enabled_flags) if enabled)


def project_qkv(attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None) -> QueryKeyValue:
    """Project an attention layer's inputs to q (B, S, H * D) and to k and v (B, K, H * D).

    k and v come from `encoder_hidden_states`, or from `hidden_states` if that is None.
    """
    if encoder_hidden_states is None:
        query, key, value = project_linear_layers((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        return query, key, value
    (query,) = project_linear_layers((attn.to_q,), hidden_states)
    key, value = project_linear_layers((attn.to_k, attn.to_v), encoder_hidden_states)
    return query, key, value


def project_output(attn: Any, attention_output: torch.Tensor) -> torch.Tensor:
    """Apply an attention layer's output projection and dropout to the attended values; the result is (B, S, H * D)."""
    projection, dropout = attn.to_out
    output = projection(attention_output)
    # Not called where PyTorch would return its input, and nobody would see the call.
    is_idle = type(dropout) is nn.Dropout and dropout.p == 0
    if is_idle and not is_hooked(dropout) and not has_module_or_global_hooks((dropout,)):
        return output
    return dropout(output)


def rotate_pairs(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of heads (..., D) with tables (..., D / 2). The result has the heads' dtype."""
    # (..., D) to (..., D / 2, 2): the two elements of each pair.
    a, b = heads.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(heads)


# Attributes of Diffusers' attention layers. The `added` ones are for text.
QK_NORM_NAMES = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class RecomputableTensor(NamedTuple):
    """A tensor together with a function that computes it again in the backward pass, so that it need not be saved."""

    tensor: torch.Tensor
    recompute: Callable[[], torch.Tensor]
    """Computes the same values, bit for bit. Refers only to tensors that are saved for other reasons."""

    @contextmanager
    def skip_saving_activation(self) -> Iterator[None]:
        """Context in which autograd does not save the memory of a recomputable tensor.

        The backward pass calls `recompute` instead.
        """
        # Compiled, the graph's partitioner decides what is kept.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            yield
            return
        # Hooks nest, but PyTorch only calls the innermost ones: ours would hide those that are set already. PyTorch
        # has no public way to see them. Hooks that only count are called from ours, so that they count the rest.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        counts: Any = outer[0] if outer and hasattr(outer[0], COUNTS_ONLY) else None
        if outer and counts is None:  # checkpointing or offload: they decide about this tensor too
            yield
            return
        # Do not close over `self`: `unpack_saved_tensor` lives until the backward pass and would keep the tensor.
        memory, recompute = _get_memory_key(self.tensor), self.recompute

        def pack_saved_tensor(saved: torch.Tensor) -> torch.Tensor | tuple[int, ...]:
            # Adapters save the tensor itself or a reshaped view of it: both cover all of its memory.
            if _get_memory_key(saved) == memory:
                return tuple(saved.shape)
            return counts(saved) if counts else saved

        def unpack_saved_tensor(saved: torch.Tensor | tuple[int, ...]) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            with torch.no_grad():
                return recompute().reshape(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack_saved_tensor, unpack_saved_tensor):
            yield


def _get_memory_key(tensor: torch.Tensor) -> tuple[int, int, int, bool]:
    """Identity of a tensor's memory: equal for all contiguous views that cover the same contiguous tensor."""
    # The storage's address as an object: a tensor without values (fake, meta) has no data pointer to compare.
    memory = tensor.untyped_storage()._cdata
    return memory, int(tensor.storage_offset()), tensor.numel(), tensor.is_contiguous()


def _delegate_to_stock_attribute(name: str) -> property:
    """A property that reads and writes this attribute of the wrapped stock processor.

    It reads as None if the stock processor lacks the attribute.
    """
    return property(lambda self: getattr(self.stock, name, None), lambda self, value: setattr(self.stock, name, value))


class FusedProcessor:
    """Base class of fused attention processors. Holds the stock processor and the model's `FusedModelState`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `Attention.forward` asks for the signature at every call: a stored one is faster.
        call: Any = vars(cls).get("__call__")
        if call is not None:
            call.__signature__ = inspect.signature(call)

    def __init__(self, stock: Any, fusion: FusedModelState, attn: Any) -> None:
        self.stock = stock
        self.fusion = fusion
        self.has_recoverable_norms = True
        """True if norms of q and k may run backward from their outputs. Also without weights, or with meta tensors."""
        for name in QK_NORM_NAMES:
            norm = getattr(attn, name, None)
            weight = None if norm is None else self.get_norm_weight(norm)
            # Read once, here: reading the weights synchronizes with the device.
            if weight is not None and not weight.is_meta and not recoverable(weight, getattr(norm, "bias", None)):
                self.has_recoverable_norms = False
                break

    @property
    def should_use_stock_processor(self) -> bool:
        """True if an attention layer must run its stock processor instead of the fused one.

        Under context parallelism it always must. Subclasses may support context parallelism, or have more conditions.
        """
        return not self.fusion.is_on(ATTENTION) or self._parallel_config is not None

    @property
    def backend(self) -> str | None:
        """Diffusers' name of the attention backend; None for PyTorch's choice.

        It is the argument of `fuse`, else that of `set_attention_backend`.
        """
        return self.fusion.backend or self._attention_backend

    # Diffusers' set_attention_backend and enable_parallelism set these two on a layer's processor. They are forwarded
    # to the stock processor, so that it uses them when it runs, and still has them when the model is unfused.
    _attention_backend = _delegate_to_stock_attribute("_attention_backend")
    _parallel_config = _delegate_to_stock_attribute("_parallel_config")

    def get_norm_weight(self, norm: Any) -> torch.Tensor | None:
        """The weight that the norm of q or k multiplies by; None if the norm has no weights."""
        return getattr(norm, "weight", None)

    def norm_and_rotate(
        self,
        heads: torch.Tensor,
        norm: Any,
        rotary: RotaryTables | None,
        kind: NormKind,
        *,
        first_token: int = 0,
        across_heads: bool = False,
        rotation: str = "interleaved",
    ) -> torch.Tensor:
        """Norm and rotate q or k (B, S, H, D) with one kernel.

        Args:
            heads: q or k, (B, S, H, D).
            norm: A module of the class that `kind` names; None for no norm.
            rotary: Tables as `qk_norm_rope` takes them; None for no rotation.
            kind: `layer` or `rms`.
            first_token: Index of the first token that is rotated; R tokens (the length of the tables) are.
            across_heads: Norm over all heads of a token instead of each head.
            rotation: Which elements form a pair, as `qk_norm_rope` names it.
        """
        return qk_norm_rope(
            heads,
            self.get_norm_weight(norm),
            getattr(norm, "bias", None),
            *(rotary or (None, None)),
            norm="none" if norm is None else kind,
            eps=0.0 if norm is None else norm.eps,
            across_heads=across_heads,
            rotation=rotation,
            first=first_token,
            from_output=self.has_recoverable_norms,
        )

    def norm_and_rotate_heads(
        self, heads: torch.Tensor, norm: Any, rotary: RotaryTables | None, kind: NormKind, first_token: int = 0
    ) -> torch.Tensor:
        """q or k (B, S, H, D), normed per head; R tokens from `first_token` are rotated with tables (R, D).

        Uses the kernel if its op is on, else the stock modules.
        """
        if norm is None and rotary is None:
            return heads
        if self.fusion.is_on("qk_norm_rope"):
            return self.norm_and_rotate(heads, norm, rotary, kind, first_token=first_token)
        if norm is not None:
            heads = norm(heads)
        if rotary is None:
            return heads
        # The tables have one row per rotated token; tokens before and after keep their values.
        stop = first_token + len(rotary[0])
        rotate: Any = apply_rotary_emb  # its annotations are of complex tables
        rotated = rotate(heads[:, first_token:stop], rotary, sequence_dim=1)
        return torch.cat([heads[:, :first_token], rotated, heads[:, stop:]], dim=1)


class SharedInputProcessor(FusedProcessor):
    """`AttnProcessor2_0` and Sana's processor, with one projection call for q, k and v of the same input.

    Supports attention without spatial or group norm, with norms of q and k per head or across heads.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        # Images (B, C, H, W), and text of another batch size, go to the stock code.
        plain = hidden_states.ndim == 3 and len(hidden_states) == len(source)
        if self.should_use_stock_processor or args or kwargs or not plain:
            # Pass temb on only before other positional arguments: it is for a spatial norm, and there is none.
            positional = (temb, *args) if args else ()
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, *positional, **kwargs)
        query, key, value = project_qkv(attn, hidden_states, encoder_hidden_states)
        query, key = self.normalize_qk(attn, query, key)
        mask = reshape_mask(attn, attention_mask, source)
        # (B, S, H * D) to (B, S, H, D), as a view.
        query, key, value = (tensor.view(*tensor.shape[:2], attn.heads, -1) for tensor in (query, key, value))
        attended = attend(query, key, value, mask, self.backend).flatten(2)
        if attended.dtype is not query.dtype:
            attended = attended.to(query.dtype)
        output = project_output(attn, attended)
        factor = attn.rescale_output_factor
        return output if factor == 1 else output / factor

    def normalize_qk(
        self, attn: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k (B, S, H * D) after the layer's norms, which here are across heads or missing."""
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        return query, key


def reshape_mask(attn: Attention, mask: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor | None:
    """Reshape a block's mask of the tokens of `source` (B, K, .) to (B, 1 or H, 1 or S, K), as attention takes it."""
    if mask is None:
        return None
    # One mask for all heads: PyTorch broadcasts it without a copy.
    if len(mask) == len(source) and mask.shape[-1] == source.shape[1]:
        return mask.reshape(len(source), 1, -1, source.shape[1])
    # Diffusers repeats the mask for each head within the batch: (B * H, 1 or S, K), which the view splits.
    mask = attn.prepare_attention_mask(mask, source.shape[1], len(source))
    return mask.view(len(source), attn.heads, -1, mask.shape[-1])


def find_plain_attention_problem(attn: Any) -> str | None:
    """Why this layer needs more than projections and attention, and so its stock processor; None if it does not."""
    if attn.spatial_norm is not None or attn.group_norm is not None or attn.norm_cross:
        return "its input has a norm of its own"
    if attn.residual_connection:
        return "it adds its input itself"
    if getattr(attn, "fused_projections", False):
        return "its projections are fused already"
    return None


def _find_unnormed_problem(attn: Any) -> str | None:
    # AttnProcessor2_0 norms per head, but `SharedInputProcessor.normalize_qk` norms across heads, as Sana does.
    # One of the two norms is enough.
    normed = attn.norm_q is not None or attn.norm_k is not None
    return find_plain_attention_problem(attn) or ("it norms q and k" if normed else None)


PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.AttnProcessor2_0",
        ATTENTION,
        SharedInputProcessor,
        _find_unnormed_problem,
    ),
)
