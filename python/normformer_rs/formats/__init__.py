"""Models and tokenisations in the formats of fairseq and Hugging Face."""
