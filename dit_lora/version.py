"""The version of dit-lora."""

__version__ = "0.1.0"
