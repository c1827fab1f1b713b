"""One run of an arm and a seed."""
