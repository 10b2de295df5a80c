"""Plan fits before they start."""
