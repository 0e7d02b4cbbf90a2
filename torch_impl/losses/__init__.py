"""The losses of a head in PyTorch, each an objective of one loop."""
