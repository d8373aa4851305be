"""Checkpoints: manifests and retention (no framework), saving and loading on any layout, Hugging Face conversion."""
