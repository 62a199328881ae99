"""The guard in anybody's loop: `Guard.attach`, and the callback for Transformers' Trainer."""
