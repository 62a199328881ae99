"""The HTML page of a data set audit."""
