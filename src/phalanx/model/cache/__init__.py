"""KV rows of unequal length: the caches models are called with, and the buffers behind them."""
