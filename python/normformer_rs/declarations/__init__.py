"""The declarations that users write: parts of norms and schemes, their initial values, and classes in files."""
