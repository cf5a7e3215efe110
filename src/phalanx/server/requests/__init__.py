"""From a body's fields to a request that can be scheduled, or a refusal that names the field."""
