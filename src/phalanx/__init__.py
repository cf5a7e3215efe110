"""phalanx: one large language model, served from several machines that you own."""

__version__ = "0.1.0"
