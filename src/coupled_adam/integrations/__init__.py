"""What other training frameworks import: one module for each, which needs that framework."""
