"""VideoChat2: a video transformer, a Q-Former and a causal language model. Transformers has no such class."""
