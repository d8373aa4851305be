"""Data parallelism: FSDP, and the order of its collectives."""
