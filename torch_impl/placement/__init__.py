"""Where a head's rows are in PyTorch, and how they and the tokens come together."""
