"""Text -> a corpus of token ids, cached by its content."""
