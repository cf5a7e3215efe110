"""Which replica gets which request, and when: health, circuits, policies, a fair queue."""
