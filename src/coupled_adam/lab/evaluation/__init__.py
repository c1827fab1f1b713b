"""A run, or a model -> what can be measured of it."""
