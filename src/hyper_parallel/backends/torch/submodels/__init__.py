"""Towers of multimodal models on ranks of their own, connected by features and their gradients."""
