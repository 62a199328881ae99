"""LTX-2's blocks and attention on fused ops: a video and an audio stream, which may attend to each other.

Source of the arithmetic: diffusers, models/transformers/transformer_ltx2.py (LTX2VideoTransformerBlock,
LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor).

Shapes: B batch, S tokens of a stream, K key tokens, T text tokens, D width, H heads; G modulation rows per sample,
1 or S.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.normalization import RMSNorm

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, attend, project_output, project_qkv, reshape_mask
from dit_lora.fuse.models.across_heads import AcrossHeadsProcessor, find_rms_norm_problem
from dit_lora.fuse.models.streams import normalize_stream
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op, make_norm_class_check
from dit_lora_kernels.ada_norm import AdaNormInputs

_LTX2 = "diffusers.models.transformers.transformer_ltx2"
_AV_NORMS = ("audio_to_video_norm", "video_to_audio_norm")
ModulationRows = tuple[torch.Tensor, ...]
"""Modulation rows, each (B, G, D)."""


class _StreamState(NamedTuple):
    """State of the video stream or the audio stream while it passes through an LTX-2 block."""

    block: Any
    prefix: str
    """Prefix of the names of its modules: empty, or `audio_`."""
    x: torch.Tensor
    rows: ModulationRows
    """Shift, scale and gate of self-attention, then of the feed-forward, and in LTX-2.3 of attention to the text."""
    y: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    """y is a pending branch output. The next norm adds it to x, times `gate` if there is one."""

    def get_part(self, name: str) -> Any:
        return getattr(self.block, f"{self.prefix}{name}")

    def normalize(
        self, norm: Any, shift: torch.Tensor | None, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, "_StreamState"]:
        """The stream x plus its pending update y, normed and modulated. Also returns the stream with y added."""
        tables = (shift, scale, self.gate)
        # (B, 1 or G, D) to one number of groups. A single row stands for all tokens.
        groups = max([1, *(table.shape[1] for table in tables if table is not None)])
        shift, scale, gate = (None if table is None else table.expand(-1, groups, -1) for table in tables)
        stream = AdaNormInputs(self.x, shift, scale, self.y, gate)
        normed, x = normalize_stream(norm, stream, "rms")
        return normed, self._replace(x=x, y=None, gate=None)


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    audio_hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    audio_encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    temb_audio: torch.Tensor,
    temb_ca_scale_shift: torch.Tensor,
    temb_ca_audio_scale_shift: torch.Tensor,
    temb_ca_gate: torch.Tensor,
    temb_ca_audio_gate: torch.Tensor,
    temb_prompt: torch.Tensor | None = None,
    temb_prompt_audio: torch.Tensor | None = None,
    video_rotary_emb: RotaryTables | None = None,
    audio_rotary_emb: RotaryTables | None = None,
    ca_video_rotary_emb: RotaryTables | None = None,
    ca_audio_rotary_emb: RotaryTables | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    audio_encoder_attention_mask: torch.Tensor | None = None,
    self_attention_mask: torch.Tensor | None = None,
    audio_self_attention_mask: torch.Tensor | None = None,
    a2v_cross_attention_mask: torch.Tensor | None = None,
    v2a_cross_attention_mask: torch.Tensor | None = None,
    use_a2v_cross_attention: bool = True,
    use_v2a_cross_attention: bool = True,
    perturbation_mask: torch.Tensor | None = None,
    all_perturbed: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `LTX2VideoTransformerBlock`: video and audio (B, S, D) after attention and feed-forward."""
    perturbed = {}
    if block.perturbed_attn:
        perturbed = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
    # Keep the order of the stock block, so that dropout draws the same random numbers.
    video = _enter_block(block, "", hidden_states, temb)
    video = _apply_self_attention(video, video_rotary_emb, self_attention_mask, perturbed)
    sound = _enter_block(block, "audio_", audio_hidden_states, temb_audio)
    sound = _apply_self_attention(sound, audio_rotary_emb, audio_self_attention_mask, perturbed)
    video = _apply_text_attention(video, encoder_hidden_states, temb_prompt, encoder_attention_mask)
    sound = _apply_text_attention(sound, audio_encoder_hidden_states, temb_prompt_audio, audio_encoder_attention_mask)
    if use_a2v_cross_attention or use_v2a_cross_attention:
        video, sound = _apply_cross_modal_attention(
            (video, sound),
            (
                (temb_ca_scale_shift, temb_ca_gate, ca_video_rotary_emb),
                (temb_ca_audio_scale_shift, temb_ca_audio_gate, ca_audio_rotary_emb),
            ),
            (a2v_cross_attention_mask, v2a_cross_attention_mask),
            (use_a2v_cross_attention, use_v2a_cross_attention),
        )
    return _apply_feed_forward(video), _apply_feed_forward(sound)


def _compute_rows(table: torch.Tensor, temb: torch.Tensor) -> ModulationRows:
    """Modulation rows of an LTX-2 block: its table (rows, D) plus the shared embedding (B, G, rows * D)."""
    return (table.to(temb.device) + temb.unflatten(-1, table.shape)).unbind(dim=2)


def _enter_block(block: Any, prefix: str, x: torch.Tensor, temb: torch.Tensor) -> _StreamState:
    """State of the video or audio stream at the start of an LTX-2 block."""
    # Six rows, or nine in LTX-2.3, which also modulates attention to the text.
    rows = _compute_rows(getattr(block, f"{prefix}scale_shift_table"), temb)
    # An fp32 table makes the stock block's residual stream fp32.
    return _StreamState(block, prefix, x.to(torch.promote_types(x.dtype, rows[0].dtype)), rows)


def _apply_self_attention(
    state: _StreamState, rotary: RotaryTables | None, mask: torch.Tensor | None, perturbation_kwargs: dict[str, Any]
) -> _StreamState:
    # Rows 0 to 2 belong to self-attention.
    shift, scale, gate = state.rows[:3]
    normed, state = state.normalize(state.get_part("norm1"), shift, scale)
    y = state.get_part("attn1")(
        hidden_states=normed,
        encoder_hidden_states=None,
        query_rotary_emb=rotary,
        attention_mask=mask,
        **perturbation_kwargs,
    )
    return state._replace(y=y, gate=gate)


def _apply_text_attention(
    state: _StreamState, text: torch.Tensor, temb: torch.Tensor | None, mask: torch.Tensor | None
) -> _StreamState:
    """Cross-attention from one stream's tokens to the text (B, T, .), added to the tokens."""
    # Rows 6 to 8 exist only in LTX-2.3; otherwise this attention has no modulation.
    shift, scale, gate = state.rows[6:9] or (None, None, None)
    normed, state = state.normalize(state.get_part("norm2"), shift, scale)
    if state.block.cross_attn_adaln:
        table = state.get_part("prompt_scale_shift_table")
        if temb is None:  # the same at every timestep
            rows: ModulationRows = table[None, None].to(state.x).unbind(dim=2)
        else:
            rows = _compute_rows(table, temb)
        text = text * (1 + rows[1]) + rows[0]
    y = state.get_part("attn2")(normed, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask)
    return state._replace(y=y, gate=gate)


CrossModalInputs = tuple[torch.Tensor, torch.Tensor, RotaryTables | None]
"""What all blocks share for one stream's attention to the other: shifts and scales, gate, rotary tables."""


def _apply_cross_modal_attention(
    states: tuple[_StreamState, _StreamState],
    shared_inputs: tuple[CrossModalInputs, CrossModalInputs],
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    enabled: tuple[bool, bool],
) -> tuple[_StreamState, _StreamState]:
    """Attention from video to audio and from audio to video. Each reads the other stream as it was before."""
    block = states[0].block
    tables = (block.video_a2v_cross_attn_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table)
    # For each stream: scale and shift for video's queries, then for audio's queries; and the gate of its own output.
    rows = [
        _compute_rows(table[:4], stream_shared[0]) for table, stream_shared in zip(tables, shared_inputs, strict=True)
    ]
    gates = [
        _compute_rows(table[4:], stream_shared[1])[0]
        for table, stream_shared in zip(tables, shared_inputs, strict=True)
    ]
    rotary = [stream_shared[2] for stream_shared in shared_inputs]
    updated: list[_StreamState] = list(states)
    answers: list[torch.Tensor | None] = [None, None]
    # 0: video queries audio. 1: audio queries video.
    for asking, layer in enumerate((block.audio_to_video_attn, block.video_to_audio_attn)):
        if not enabled[asking]:
            continue
        normed: list[torch.Tensor] = []
        for stream, name in enumerate(_AV_NORMS):
            # Here scale comes before shift, unlike in the other tables.
            scale, shift = rows[stream][2 * asking : 2 * asking + 2]
            tokens, updated[stream] = updated[stream].normalize(getattr(block, name), shift, scale)
            normed.append(tokens)
        answers[asking] = layer(
            normed[asking],
            encoder_hidden_states=normed[1 - asking],
            query_rotary_emb=rotary[asking],
            key_rotary_emb=rotary[1 - asking],
            attention_mask=masks[asking],
        )
    video, sound = (
        side if y is None else side._replace(y=y, gate=gate)
        for side, y, gate in zip(updated, answers, gates, strict=True)
    )
    return video, sound


def _apply_feed_forward(state: _StreamState) -> torch.Tensor:
    """Tokens (B, S, D) of the video or audio stream after the feed-forward of an LTX-2 block."""
    # Rows 3 to 5 belong to the feed-forward.
    shift, scale, gate = state.rows[3:6]
    normed, state = state.normalize(state.get_part("norm3"), shift, scale)
    return torch.addcmul(state.x, gate, state.get_part("ff")(normed))


class LTX2Processor(AcrossHeadsProcessor):
    """`LTX2AudioVideoAttnProcessor` with one pass for norms across heads and rotation of q and k, and a gate per head.

    Also `LTX2PerturbedAttnProcessor` as long as nothing is perturbed, as in training.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: RotaryTables | None = None,
        key_rotary_emb: RotaryTables | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> torch.Tensor:
        if self.should_use_stock_processor or perturbation_mask is not None or all_perturbed:
            # Only one of the two stock processors accepts these arguments.
            perturbation = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
            return self.stock(
                attn,
                hidden_states,
                encoder_hidden_states,
                attention_mask,
                query_rotary_emb,
                key_rotary_emb,
                **{name: value for name, value in perturbation.items() if value is not None},
            )
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        mask = reshape_mask(attn, attention_mask, source)
        gates = None
        if attn.to_gate_logits is not None:
            gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))  # (B, S, H)
        query, key, value = project_qkv(attn, hidden_states, encoder_hidden_states)
        query = self._normalize_heads(attn, query, attn.norm_q, query_rotary_emb)
        key_rotary = query_rotary_emb if key_rotary_emb is None else key_rotary_emb
        key = self._normalize_heads(attn, key, attn.norm_k, key_rotary)
        value = value.unflatten(2, (attn.heads, -1))
        attended = attend(query, key, value, mask, self.backend).to(query.dtype)
        if gates is None:
            return project_output(attn, attended.flatten(2))
        gated = RecomputableTensor(_apply_gates(attended, gates), partial(_apply_gates, attended, gates))
        # Both factors are saved for backward anyway, so an adapter need not save the product.
        with gated.skip_saving_activation():
            return project_output(attn, gated.tensor)

    def convert_rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """Convert rotary tables for the kernel.

        Split tables (B, H, S, D / 2 H) become (B, S, H, D / 2 H), each angle once; interleaved ones (B, S, D) stay.
        """
        return (cos, sin) if cos.ndim == 3 else (cos.transpose(1, 2), sin.transpose(1, 2))

    def get_rotation_layout(self, attn: Any) -> str:
        return "half" if attn.rope_type == "split" else "interleaved"

    def apply_rotary_tables(self, attn: Any, query_or_key: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        """Rotate q or k (B, S, D) with the layer's type of rotation."""
        # Imported late: a model's module is imported with the model, not with all patches.
        from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb

        apply = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
        return apply(query_or_key, rotary)


def _apply_gates(attention_output: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Multiply each head (B, S, H, D / H) by its gate, and concatenate the heads to (B, S, D)."""
    return (attention_output * gates[..., None]).flatten(2)


_NORMS = ("norm1", "norm2", "norm3", "audio_norm1", "audio_norm2", "audio_norm3", *_AV_NORMS)
_FIND_BLOCK_PROBLEM = make_norm_class_check(_NORMS, RMSNorm)
FORWARDS = (ForwardPatch(f"{_LTX2}.LTX2VideoTransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),)
PROCESSORS = tuple(
    ProcessorPatch(f"{_LTX2}.{name}", ATTENTION, LTX2Processor, find_rms_norm_problem, get_extra_ops=get_qk_op)
    for name in ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
)
