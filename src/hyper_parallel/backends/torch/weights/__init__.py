"""Weights of sharded models: initial values, and values read from files."""
