"""LoRA and other adapters: attach them, group their parameters for the optimizer, save and load them."""
