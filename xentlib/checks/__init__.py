"""Every validation and its message, from shapes, dtype names and devices alone.

A backend describes its arrays as `ArraySpec`s and calls one function here, so a user reads the same
words from both. Wrong dtypes raise `TypeError`, wrong shapes and values `ValueError`; each message
names the argument, what was expected, what came, and the way out where the expectation does not
tell it.
"""
