"""Data preparation: from a folder of clips to batches of encoded samples."""
