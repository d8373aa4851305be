"""Checkpoints: saving and loading on any layout, files and retention, and conversion from and to Hugging Face."""
