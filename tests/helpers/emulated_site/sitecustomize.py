"""On `PYTHONPATH`, beside the folder of the tests: every Python that starts has the device of
`helpers/emulated.py`, and launches Triton's programs as for a device, in blocks as wide."""

import helpers.emulated
import xentlib.torch.triton.launch

helpers.emulated.pytest_configure()
xentlib.torch.triton.launch.INTERPRETED = False
