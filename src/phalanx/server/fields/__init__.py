"""Bodies of requests as JSON: structs, limits of size and depth, refusals."""
