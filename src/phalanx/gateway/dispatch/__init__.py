"""Decides which replica gets which request, and when: health, circuit breakers, policies, a fair queue."""
