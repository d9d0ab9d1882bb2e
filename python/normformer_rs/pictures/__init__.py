"""Draws pictures of training runs and of series of numbers."""
