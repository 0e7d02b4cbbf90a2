"""A parity run on paper: the table on the terminal, `parity.json`, and the page beside it."""
