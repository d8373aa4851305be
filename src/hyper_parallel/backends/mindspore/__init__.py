"""MindSpore back end: executes step programs, which are training steps recorded as ATen operators.

Only the modules `kernels` and `runner` import MindSpore.
"""
