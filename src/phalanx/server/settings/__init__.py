"""Settings of the HTTP server."""
