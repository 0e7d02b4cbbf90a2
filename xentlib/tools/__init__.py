"""What a user runs and a maintainer measures with: parity, conformance, audit, cross-check, doctor,
plan, bench and the command line. It imports the library; the library never imports it."""
