"""From text to a corpus of token ids, which is cached by its content."""
