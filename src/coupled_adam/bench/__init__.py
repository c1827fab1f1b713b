"""How long steps take, and what memory."""
