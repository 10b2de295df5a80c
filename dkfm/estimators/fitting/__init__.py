"""How each estimator is fitted. No class of scikit-learn's is known here but those that prepare data."""
