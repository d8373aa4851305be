"""Checkpoints that load on any layout: saving, loading, retention, and conversion from and to Hugging Face formats."""
