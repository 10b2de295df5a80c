"""Programs for type checkers."""
