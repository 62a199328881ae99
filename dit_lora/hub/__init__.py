"""Publishes a run's result on the Hugging Face Hub: the files, the model card, and the push."""
