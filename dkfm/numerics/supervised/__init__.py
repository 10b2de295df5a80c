"""Learn discriminants and ridge regressions from labels or targets, with a Gram matrix or the features of a map."""
