"""Which dataset item a row of a model's input is, as far as that can be proven."""
