"""Captions: encoded one by one, in a chat template, and cut by their masks."""
