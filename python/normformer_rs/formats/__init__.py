"""Converts models and tokenisations to and from the formats of fairseq and Hugging Face."""
