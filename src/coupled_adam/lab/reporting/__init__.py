"""Reports of finished runs: statistics, tables, figures and one page."""
