"""Parses a body's fields into a request for the scheduler, or refuses it by the field's name."""
