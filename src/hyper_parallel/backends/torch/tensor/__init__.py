"""Tensor and sequence parallelism on one or two mesh axes."""
