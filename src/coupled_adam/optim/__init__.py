"""The optimizer; needs torch only."""
