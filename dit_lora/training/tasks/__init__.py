"""The kinds of training: diffusion and chat."""
