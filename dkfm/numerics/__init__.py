"""From a Gram matrix to a frozen model, and rows through it."""
