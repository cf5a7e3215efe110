"""The engine process: boot, the leader's loop, the mirror every rank keeps, and the client that starts it."""
