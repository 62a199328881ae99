"""Masks of captions (B, T): looked at where they lie, which in a step is on the host (`dit_lora.data.loading.batch.ON_HOST`)."""

import torch

from dit_lora.numerics.streams import moved

MASKED = -10000.0
"""The bias of a token to leave out (diffusers: sana_transformer.py and latte_transformer_3d.py, forward)."""


def cut_text(
    embeddings: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return embeddings (B, T, ...) and their mask without the tokens that no caption of the batch has.

    Captions are cached padded to one length; a batch needs its longest one's. The mask is None where nothing that is
    left is masked: attention then has more and faster backends.
    """
    kept = mask == 1
    columns = kept.any(0).nonzero().flatten()
    # A slice is no copy; padding in the middle of captions takes one.
    if len(columns) == 0 or int(columns[-1]) == len(columns) - 1:
        cut = embeddings[:, : len(columns)]
    else:
        cut = embeddings.index_select(1, moved(columns, embeddings.device))
    kept = kept[:, columns]
    return cut, None if bool(kept.all()) else kept


def text_bias(mask: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor | None:
    """Return what is added to the scores of tokens, (B, 1, T) in the dtype and on the device of their embeddings.

    None where the mask, of ones and zeros, leaves out none: without a bias, attention has more and faster backends.
    """
    kept = mask == 1
    if bool(kept.all()):
        return None
    bias = torch.where(kept, 0.0, MASKED).to(embeddings.dtype)
    return moved(bias[:, None], embeddings.device)


def own_tokens(embeddings: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return each caption's own embeddings, (its length, ...), of captions (B, T, ...) that are padded at their ends."""
    lengths = mask.sum(1).tolist()
    return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]
