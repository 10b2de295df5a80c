"""Functions that fit the estimators. Of scikit-learn's classes they use only `StandardScaler` and `KMeans`."""
