"""A rank: how it starts, the loops of the leader and of a worker, the mirror that both keep, the self-test."""
