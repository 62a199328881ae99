"""Architectures that neither Diffusers nor Transformers has."""
