"""Torch engine: model, optimizer and step of one rank, their memory and time, and steps executed by a memory plan."""
