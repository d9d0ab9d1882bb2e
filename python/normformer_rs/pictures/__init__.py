"""Pictures of training runs and of numbers by name."""
