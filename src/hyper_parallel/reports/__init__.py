"""Reports: one self-contained HTML page and a Perfetto trace from a run directory; imports no framework."""
