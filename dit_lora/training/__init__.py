"""Training: precompute the data, run the training loop, save the result, and everything these steps need."""
