"""The HTTP server: OpenAI's API in front of an engine that runs in a process of its own."""
