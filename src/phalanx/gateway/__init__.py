"""One address for many replicas: health checks, dispatch, a fair queue and a proxy."""
