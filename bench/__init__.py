"""Measurements. Each module prints one JSON object; see ``bench.report``."""
