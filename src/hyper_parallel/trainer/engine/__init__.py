"""Engines of the trainer: model, optimizer and training step of one rank, with measurements and offload."""
