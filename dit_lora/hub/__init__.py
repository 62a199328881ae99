"""A run's result on the Hugging Face Hub: what is published, its model card, and the push."""
