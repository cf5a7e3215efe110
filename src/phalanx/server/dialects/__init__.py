"""The APIs that clients speak: each one a parser and a formatter around the same requests and deltas."""
