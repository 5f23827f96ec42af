"""Measured and assumed properties of networks; each file says source, date and licence."""
