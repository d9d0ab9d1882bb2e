"""Measurements on the user's own machine: `python -m normformer_rs.bench gpu`."""
