"""OpenAI's chat and text completions."""
