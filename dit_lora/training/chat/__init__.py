"""Chat models: trained, evaluated, talked to."""
