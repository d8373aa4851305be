"""Supernode: machines as planning sees them, from YAML presets or detected."""

from hyper_parallel.topology._types import Device, MemoryPool, Quantity, Supernode, Tier

__all__ = ["Device", "MemoryPool", "Quantity", "Supernode", "Tier"]
