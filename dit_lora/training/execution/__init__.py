"""Ways to fit a step into memory or speed it up: gradient checkpointing, offload and compilation."""
