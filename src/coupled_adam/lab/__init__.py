"""The laboratory: language models trained side by side; needs the extra ``[lab]``."""
