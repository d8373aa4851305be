"""Checks that `tools/sweep.py` runs over model types: one module per sweep, see `tools/sweeps/interface.py`."""
