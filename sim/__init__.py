"""Emulated and simulated networks around the production code."""

__project__ = "farflow"
