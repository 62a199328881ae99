"""Write HTML reports of runs, audits and captions, each as a single self-contained file."""
