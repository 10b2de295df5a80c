"""Factor a Gram matrix of any size into tiles on disk, and solve linear systems with them."""
