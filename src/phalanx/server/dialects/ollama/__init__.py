"""Ollama's chats, completions and lists of models."""
