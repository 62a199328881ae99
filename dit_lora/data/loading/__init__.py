"""Order, batches and reading of the training samples."""
