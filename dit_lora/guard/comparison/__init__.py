"""Compare fused kernels with the reference model, on a run's blocks and batches."""
