"""Torch engine: model, optimizer and training step of one rank, with measurements and offload by a memory plan."""
