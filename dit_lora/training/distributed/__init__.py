"""Engines that spread a training step over ranks: DDP, FSDP2, ZeRO-2 and context parallelism."""
