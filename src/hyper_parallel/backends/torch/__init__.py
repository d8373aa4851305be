"""PyTorch back end: tensor and sequence parallel modules, FSDP2, weights, counted collectives."""
