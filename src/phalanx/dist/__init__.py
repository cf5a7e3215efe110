"""Groups of ranks: collectives and the control channel. The only package that uses `mx.distributed`."""
