"""Labels that teach nothing, or that no table has."""

import torch

from dit_lora.numerics.objectives import IGNORE


def label_faults(
    labels: torch.Tensor, *, ignore: int = IGNORE, classes: int | None = None
) -> str | None:
    """Return what is wrong with one sample's integer labels (any shape), in words; None if nothing is.

    All of them ignored: a mean over no token is NaN. Beyond `classes`: an index error, on a GPU an assert that
    ends the process.
    """
    if not labels.numel():
        return "it has no label"
    learned = labels[labels != ignore]
    if not learned.numel():
        return f"all of its {labels.numel()} labels are {ignore}, which the loss ignores"
    if classes is not None:
        outside = learned[(learned < 0) | (learned >= classes)]
        if outside.numel():
            return f"label {int(outside[0])} is outside 0..{classes - 1}"
    return None
