"""An operator's settings: flags, clients' keys and limits, replicas, watched files."""
