"""Finished results of runs: finding them, their training metadata, verification and export."""
