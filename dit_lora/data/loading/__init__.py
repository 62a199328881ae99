"""The order, batches and reading of samples."""
