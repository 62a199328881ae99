"""Check labels for samples without any label to learn, and for class ids outside the table."""

import torch

from dit_lora.numerics.objectives import IGNORE_INDEX


def find_label_problem(
    labels: torch.Tensor, *, ignore_index: int = IGNORE_INDEX, num_classes: int | None = None
) -> str | None:
    """Message about one sample's integer labels (any shape); None if they are usable.

    A sample whose labels are all `ignore_index` has a NaN loss, a mean over no token. A label outside 0..`num_classes`
    - 1 is an index error, and on a GPU an assert that ends the process.
    """
    if not labels.numel():
        return "it has no label"
    # (N,) labels that the loss is computed for, of any input shape.
    learned = labels[labels != ignore_index]
    if not learned.numel():
        return f"all of its {labels.numel()} labels are {ignore_index}, which the loss ignores"
    if num_classes is not None:
        # Ignored labels such as -100 are not class ids, so only learned ones are compared with the table.
        outside = learned[(learned < 0) | (learned >= num_classes)]
        if outside.numel():
            return f"label {int(outside[0])} is outside 0..{num_classes - 1}"
    return None
