"""Trainer: data, optimisation, checkpoints, metrics, generation."""
