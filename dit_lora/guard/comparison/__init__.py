"""Compare fused kernels with the stock model, on a run's own blocks and batches."""
