"""Groups of ranks: the only users of `mx.distributed` and of the control port."""
