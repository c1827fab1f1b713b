"""Text on disk, read as documents, and as token ids."""
