"""The guard for any training loop: `Guard.attach`, and the callbacks for Transformers' and Lightning's trainers."""
