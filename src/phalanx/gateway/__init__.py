"""One address for many replicas: health, dispatch, a fair queue and a proxy. Knows no models."""
