"""`dit-lora studio`: a web app on this machine for runs, their reports, and captions."""
