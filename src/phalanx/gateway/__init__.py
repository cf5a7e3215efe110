"""One address for many replicas (G1, G2): health, dispatch, a fair queue and a proxy. Knows no models."""
