"""Data preparation: a folder of clips becomes batches of encoded samples."""
