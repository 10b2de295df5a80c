"""Learn from labels or targets: discriminants, and ridge regression, from a Gram matrix or the features of a map."""
