"""Caption masks (B, T), evaluated on the device they are on.

In a training step that is the host (`dit_lora.data.loading.batch.HOST_TENSORS`).
"""

import torch

from dit_lora.numerics.streams import move_to_device

MASKED_BIAS = -10000.0
"""Attention bias of a masked token (diffusers: sana_transformer.py and latte_transformer_3d.py, forward)."""


def cut_text(embeddings: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Remove the token columns that are padding in every caption of a batch.

    Captions are cached padded to one length, but a batch only needs the length of its longest caption.

    Args:
        embeddings: (B, T, ...).
        mask: (B, T), 1 for text.

    Returns:
        The shortened embeddings and mask. The mask is None if nothing is masked any more: attention then has more and
        faster backends.
    """
    is_text = mask == 1
    # Columns in which at least one caption has text.
    columns = is_text.any(0).nonzero().flatten()
    # Prefer a slice, which does not copy. Only padding in the middle of captions needs a copy.
    if len(columns) == 0 or int(columns[-1]) == len(columns) - 1:
        shortened = embeddings[:, : len(columns)]
    else:
        shortened = embeddings.index_select(1, move_to_device(columns, embeddings.device))
    is_text = is_text[:, columns]
    return shortened, None if bool(is_text.all()) else is_text


def text_bias(mask: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor | None:
    """Attention bias (B, 1, T) of a mask of ones and zeros, in the dtype and on the device of the embeddings.

    None if nothing is masked: without a bias, attention has more and faster backends.
    """
    is_text = mask == 1
    if bool(is_text.all()):
        return None
    # (B, T), then (B, 1, T) for all queries.
    bias = torch.where(is_text, 0.0, MASKED_BIAS).to(embeddings.dtype)
    return move_to_device(bias[:, None], embeddings.device)


def unpad_captions(embeddings: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Embeddings of each caption without its padding, (length, ...), from captions (B, T, ...) padded at the end."""
    lengths = mask.sum(1).tolist()
    return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]
