"""Generates the documentation's pages from docs/, README, the package's tables and docstrings, and the notebooks.

`make docs` runs `python -m docs.generate` and then zensical. The pages are not committed.
"""
