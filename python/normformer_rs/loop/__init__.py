"""The training loop from Python: the trainer, a run's log and progress, and uses of a trained model."""
