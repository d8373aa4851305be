"""Pipeline stages: cut out of a model, and run in the order of a schedule."""
