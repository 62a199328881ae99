"""Finished results: where they are, what they were trained on, verification and export."""
