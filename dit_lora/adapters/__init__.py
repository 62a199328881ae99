"""LoRA adapters: attach, group for the optimizer, store."""
