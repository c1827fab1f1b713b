"""Finished runs -> statistics, tables, pictures, one page."""
