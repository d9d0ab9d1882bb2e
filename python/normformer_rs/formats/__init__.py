"""Converts models to and from fairseq's format, writes models and tokenisers for Hugging Face, and reads records."""
