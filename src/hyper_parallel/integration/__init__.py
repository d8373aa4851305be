"""Integrations: trainers of other projects that run on this package's layouts."""
