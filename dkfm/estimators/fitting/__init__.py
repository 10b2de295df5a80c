"""Fit the estimators; of scikit-learn's classes, only `StandardScaler` and `KMeans` are used."""
