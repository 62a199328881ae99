"""Parts that several tiny twins are built of."""
