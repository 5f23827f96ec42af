"""Rival ways to train, modelled on the simulator's kernel, to compare with."""
