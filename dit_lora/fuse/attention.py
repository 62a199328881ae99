"""Attention of a fused model: one way to call it, whatever the model, and one policy on backends and masks.

Diffusers' dispatcher chooses the backend; many of its stock processors call PyTorch past it, so that a chosen
backend changes nothing there. Fused processors all come through `attend`.

Shapes: B batch, S query tokens, K key tokens, H heads, D head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch.backends import cuda

from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.core import ATTENTION, Fusion, ProcessorPatch
from dit_lora.fuse.lora import project
from dit_lora.numerics.whole import ONLY_COUNTS
from dit_lora_kernels.qk_norm_rope import recoverable

TRAINABLE = (
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flash_hub",
    "flash_4_hub",
    "_flash_3",
    "_flash_3_hub",
    "flex",
    "xformers",
)
"""Diffusers' backends that have a backward; Sage and aiter are for inference."""


def require_backend(name: str) -> str:
    """The name, if Diffusers can train with it here; raises with those that it has, or with what is missing."""
    from diffusers.models.attention_dispatch import (
        _check_attention_backend_requirements,
        _maybe_download_kernel_for_backend,
    )

    if name not in TRAINABLE:
        raise DitLoraError(listed(f"kernels.attention: {name} does not train; choose", TRAINABLE))
    backend = AttentionBackendName(name)
    try:
        _check_attention_backend_requirements(backend)
        _maybe_download_kernel_for_backend(backend)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise DitLoraError(f"kernels.attention: {name} cannot be used here: {error}") from error
    return name


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    backend: str | None,
    parallel: Any = None,
) -> torch.Tensor:
    """Softmax attention of (B, S, H, D) over (B, K, H, D), as (B, S, H, D); `mask` as PyTorch's.

    With a mask cuDNN is never used: its backward can give NaN (pytorch issue 196678). `parallel` is Diffusers'
    configuration of ranks that share a sample, each with its S and K tokens.
    """
    name = None if backend is None else AttentionBackendName(backend)
    with _no_cudnn(mask):
        return dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=name, parallel_config=parallel
        )


@contextmanager
def _no_cudnn(mask: torch.Tensor | None) -> Iterator[None]:
    if mask is None or not mask.is_cuda or not cuda.cudnn_sdp_enabled():
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class Recomputable(NamedTuple):
    """A tensor that backward may compute again from what is kept anyway."""

    tensor: torch.Tensor
    again: Callable[[], torch.Tensor]
    """The same values, bit for bit; holds nothing that is not kept for other reasons."""

    @contextmanager
    def not_kept(self) -> Iterator[None]:
        """What is saved for backward within it does not hold the tensor's memory."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            yield
            return
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        counts: Any = outer[0] if outer and hasattr(outer[0], ONLY_COUNTS) else None
        if outer and counts is None:  # checkpointing, offload: they decide what becomes of this too
            yield
            return
        # Not `self`: what unpacks lives until the backward pass, and the tensor would with it.
        place, again = _place(self.tensor), self.again

        def pack(saved: torch.Tensor) -> torch.Tensor | tuple[int, ...]:
            # Adapters save the tensor itself or all its rows.
            if _place(saved) == place:
                return tuple(saved.shape)
            return counts(saved) if counts else saved

        def unpack(saved: torch.Tensor | tuple[int, ...]) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            with torch.no_grad():
                return again().reshape(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _place(tensor: torch.Tensor) -> tuple[int, int, int, bool]:
    """Equal for contiguous views of all of a contiguous tensor, with values or without."""
    memory = tensor.untyped_storage()._cdata
    return memory, int(tensor.storage_offset()), tensor.numel(), tensor.is_contiguous()


class FusedProcessor:
    """What fused processors share: the stock processor, and the fusion that says what is on."""

    def __init__(self, stock: Any, fusion: Fusion, attn: Any) -> None:
        self.stock = stock
        self.fusion = fusion
        norms = [getattr(attn, name, None) for name in NORMS]
        # Read once, here: it is a synchronisation of the device.
        self.from_output = all(_recoverable(norm) for norm in norms if norm is not None)
        """Whether norms of q and k may run backward from their outputs."""

    @property
    def is_stock(self) -> bool:
        """Whether the stock processor is to be called: always under context parallelism, which it knows."""
        return not self.fusion.is_on(ATTENTION) or self._parallel_config is not None

    @property
    def backend(self) -> str | None:
        """The backend that `fuse` was given, else Diffusers' `set_attention_backend`; None for PyTorch's choice."""
        return self.fusion.backend or self._attention_backend

    # Diffusers' set_attention_backend and enable_parallelism set these two, for the stock processor to heed.

    @property
    def _attention_backend(self) -> Any:
        return getattr(self.stock, "_attention_backend", None)

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return getattr(self.stock, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.stock._parallel_config = config


def _recoverable(norm: Any) -> bool:
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return weight is None or weight.is_meta or recoverable(weight, bias)


class SharedInputProcessor(FusedProcessor):
    """`AttnProcessor2_0` and Sana's, with one projection of q, k and v of their shared input.

    For attention without spatial or group norm, and norms of q and k per head or across heads.
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
        plain = hidden_states.ndim == 3 and len(hidden_states) == len(source)
        if self.is_stock or args or kwargs or not plain:
            # temb alone is left out: it is for a spatial norm, and there is none.
            rest = (temb, *args) if args else ()
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, *rest, **kwargs
            )
        if encoder_hidden_states is None:
            query, key, value = project((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        else:
            (query,) = project((attn.to_q,), hidden_states)
            key, value = project((attn.to_k, attn.to_v), source)
        query, key = self.normed(attn, query, key)
        mask = heads_mask(attn, attention_mask, source)
        query, key, value = (t.unflatten(-1, (attn.heads, -1)) for t in (query, key, value))
        attended = attend(query, key, value, mask, self.backend).flatten(2).to(query.dtype)
        output = attn.to_out[1](attn.to_out[0](attended))
        factor = attn.rescale_output_factor
        return output if factor == 1 else output / factor

    def normed(
        self, attn: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k (B, S, H*D) after the layer's own norms, which here are across heads or none."""
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        return query, key


def heads_mask(
    attn: Attention, mask: torch.Tensor | None, source: torch.Tensor
) -> torch.Tensor | None:
    if mask is None:
        return None
    mask = attn.prepare_attention_mask(mask, source.shape[1], len(source))
    return mask.view(len(source), attn.heads, -1, mask.shape[-1])


def plain(attn: Any) -> str | None:
    """Why a processor that only projects and attends does not do for this layer."""
    if attn.spatial_norm is not None or attn.group_norm is not None or attn.norm_cross:
        return "its input has a norm of its own"
    if attn.residual_connection:
        return "it adds its input itself"
    if getattr(attn, "fused_projections", False):
        return "its projections are fused already"
    return None


def _plain_unnormed(attn: Any) -> str | None:
    # AttnProcessor2_0 norms per head, Sana's across heads.
    return plain(attn) or (
        "it norms q and k" if attn.norm_q is not None or attn.norm_k is not None else None
    )


PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.AttnProcessor2_0",
        ATTENTION,
        SharedInputProcessor,
        _plain_unnormed,
    ),
)
