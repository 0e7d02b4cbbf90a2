"""What `xentlib doctor` looks at: packages, backends, kernels, rows of the contract, a model."""
