"""The forward of Qwen-Image 2.1's transformer for text followed by one image, without reading values of tensors.

Diffusers' forward (models/transformers/transformer_qwenimage21.py) reads the layout of the sequence from `img_mask`,
as reference images may be anywhere in the text. On a GPU the host waits for that, and a memory plan has no values.

Shapes: B batch, T text tokens, S image tokens, D width.
"""

from types import MethodType
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel

from dit_lora.numerics.streams import move_to_device


def use_shape_based_layout(transformer: Any) -> None:
    """Replace a transformer's forward by one that computes the same, bit for bit, from shapes.

    Calls with padding, reference images or the pipeline's key-value cache run Diffusers' forward.
    """
    rope = transformer.pos_embed
    if rope.freqs[0].is_meta:
        # Its tables are neither weights nor buffers, and their values are needed on the meta device too.
        with torch.device("cpu"):
            transformer.pos_embed = type(rope)(rope.theta, rope.axes_dim)
    transformer.forward = MethodType(_forward, transformer)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    img_shapes: list[list[tuple[int, int, int]]],
    img_mask: torch.Tensor,
    **options: Any,
) -> Any:
    if options != {"return_dict": False} or len(img_shapes[0]) > 1:
        inputs = (hidden_states, encoder_hidden_states, timestep, img_shapes, img_mask)
        return QwenImage21Transformer2DModel.forward(self, *inputs, **options)
    image, text = self.img_in(hidden_states), self.txt_in(encoder_hidden_states)
    joint, num_text = torch.cat([text, image], dim=1), text.shape[1]  # (B, T + S, D)
    # On the host, where the table of positions is computed.
    is_image = torch.arange(joint.shape[1], device="cpu") >= num_text
    positions = move_to_device(self.pos_embed(img_shapes[0], is_image, device=is_image.device), image.device)
    timestep, is_modulated = timestep.to(image.dtype), None
    if self.config.causal_condition:
        # Text is modulated at timestep 0, the last row.
        timestep, is_modulated = torch.cat([timestep, timestep.new_zeros(1)]), move_to_device(is_image, image.device)
    embedded_timestep = self.time_text_embed(timestep, image)
    modulation = self.modulation(embedded_timestep)
    # (start, end, is text): attention is causal in text. The image follows, and attends to everything.
    segments = [(0, num_text, True)]
    for block in self.transformer_blocks:
        # As in Diffusers' forward, without attention mask, cache and padding.
        arguments = (joint, modulation, positions, None, is_modulated, None, None, None, segments, None)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            joint = self._gradient_checkpointing_func(block, *arguments)
        else:
            joint = block(*arguments)
    return (self.proj_out(self.norm_out(joint, embedded_timestep, is_modulated)),)
