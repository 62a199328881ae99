"""The diffusion task: encoding, model, samples and validation."""
