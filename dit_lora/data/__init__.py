"""From a folder of clips to batches of encoded ones."""
