"""Evaluation of runs and of other models: loss, measures of the embeddings, accuracy."""
