"""One run: from a corpus to a trained model in a run folder."""
