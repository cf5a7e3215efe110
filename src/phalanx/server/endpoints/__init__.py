"""The endpoints: completions, information, health."""
