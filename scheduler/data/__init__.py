"""Data algorithms: what becomes of groups and items, as small functions that a run names."""
