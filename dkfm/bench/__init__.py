"""Compare the speed of dkfm with scikit-learn and with the bare arithmetic."""
