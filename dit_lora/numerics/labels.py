"""Check labels for samples without any label to learn, and for class ids outside the table."""

import torch

from dit_lora.numerics.objectives import IGNORE


def label_faults(
    labels: torch.Tensor, *, ignore: int = IGNORE, classes: int | None = None
) -> str | None:
    """Message about one sample's integer labels (any shape); None if they are usable.

    A sample whose labels are all `ignore` has a NaN loss, a mean over no token. A label outside 0..`classes` - 1 is an
    index error, and on a GPU an assert that ends the process.
    """
    if not labels.numel():
        return "it has no label"
    # (N,) labels that the loss is computed for, of any input shape.
    learned = labels[labels != ignore]
    if not learned.numel():
        return f"all of its {labels.numel()} labels are {ignore}, which the loss ignores"
    if classes is not None:
        # Ignored labels such as -100 are not class ids, so only learned ones are compared with the table.
        outside = learned[(learned < 0) | (learned >= classes)]
        if outside.numel():
            return f"label {int(outside[0])} is outside 0..{classes - 1}"
    return None
