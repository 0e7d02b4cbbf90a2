"""What `xentlib bench` runs: time and memory beside the bare GEMMs that every loss needs."""
