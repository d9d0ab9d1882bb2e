"""What users declare: the parts of norms and schemes, their initial values, and classes in files."""
