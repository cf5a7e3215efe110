"""From tokens to deltas of an answer; what every dialect's answer is made of."""
