"""The `dit-lora` command: one file a verb."""

from dit_lora.cli.app import main

__all__ = ["main"]
