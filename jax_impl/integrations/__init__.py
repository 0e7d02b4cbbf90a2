"""xentlib inside other people's trainers and models, each in a module of its own."""
