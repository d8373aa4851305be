"""Towers of multimodal models, on separate ranks or on ranks of the language part.

A tower is an encoder of images, videos or audio with its projector. The language part is the rest of the model.
"""
