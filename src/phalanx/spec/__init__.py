"""Speculation: how a sequence may go on (drafters), whether trying pays (control), what came of it (stats)."""
