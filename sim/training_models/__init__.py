"""Rival ways to train, modelled on the simulator's kernel, for comparison with the production cores."""
