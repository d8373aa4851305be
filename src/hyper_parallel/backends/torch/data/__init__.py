"""Data parallelism: FSDP, and what is summed over ranks when a backward pass ends."""
