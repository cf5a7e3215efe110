"""Plans of a group before it starts: what fits, how fast it will be, and which one to take."""
