"""Masks of captions (B, T): looked at where they lie, which in a step is on the host (`dit_lora.data.loading.batch.ON_HOST`)."""

import torch

from dit_lora.numerics.streams import moved

MASKED = -10000.0
"""The bias of a token to leave out (diffusers: sana_transformer.py and latte_transformer_3d.py, forward)."""


def text_bias(mask: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor | None:
    """Return what is added to the scores of tokens, (B, 1, T) in the dtype and on the device of their embeddings.

    None where the mask, of ones and zeros, leaves out none: without a bias, attention has more and faster backends.
    """
    kept = mask == 1
    if bool(kept.all()):
        return None
    bias = torch.where(kept, 0.0, MASKED).to(embeddings.dtype)
    return moved(bias[:, None], embeddings.device)
