"""One request's way to a replica and back: attempts, events, streams that go on elsewhere."""
