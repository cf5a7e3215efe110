"""The HTTP server: OpenAI's endpoints over an `EngineClient`. Text and tokens live here; arrays do not."""
