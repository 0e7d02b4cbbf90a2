"""What the tools measure with: problems, how both backends run them, on ranks and shards too."""
