"""Names of samples that are only known as rows: of a micro-batch, or of a ready batch that a dataset returned."""

import re

_ROW_NAME = re.compile(r"row \d+ of (micro-batch|dataset index) .*")
_ITEM_ROW_NAME = re.compile(r"row \d+ of dataset index ")


def is_sample_name(name: str) -> bool:
    """True if a name identifies a sample for the whole run, False if it is a row number in one micro-batch."""
    return _ROW_NAME.fullmatch(name) is None


def is_micro_batch_row(name: str) -> bool:
    """True if a name is only a row number in one micro-batch, so that nothing else is known about the sample."""
    return not is_sample_name(name) and not is_item_row(name)


def is_item_row(name: str) -> bool:
    """True if a name is a row of a ready batch from a dataset, whose number says little to its user."""
    return _ITEM_ROW_NAME.match(name) is not None


def format_row_name(row: int, micro_step: int) -> str:
    return f"row {row} of micro-batch {micro_step}"
