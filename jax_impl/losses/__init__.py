"""The losses of a head in JAX, each a body of one loop."""
