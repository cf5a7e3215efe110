"""The scheduler: plain data in, plain data out."""
