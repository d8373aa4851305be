"""Clients: other projects' trainers on our layouts."""
