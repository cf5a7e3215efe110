"""The APIs of clients, each a parser and a formatter around the same requests and deltas."""
