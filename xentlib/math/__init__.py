"""What both frameworks compute for a token, written once: arrays of a namespace in and out."""
