"""Check and measure fitted estimators as their stores hold them, without scikit-learn."""
