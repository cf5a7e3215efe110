"""Inference without a server: the path of an HTTP request (parse, journal, decode), without HTTP."""
