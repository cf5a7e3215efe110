"""From logits to tokens: penalties, filters, keyed Gumbel noise, log-probabilities."""
