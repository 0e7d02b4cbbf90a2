"""A head as a module: its parameters, `NLLHead`, and logits that are not computed."""
