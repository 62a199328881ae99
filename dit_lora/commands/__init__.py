"""Bodies of the verbs that do not train."""
