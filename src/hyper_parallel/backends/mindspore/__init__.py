"""MindSpore back end: executes step programs. Imports MindSpore only in the modules that run there."""
