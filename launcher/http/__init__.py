"""The HTTP front end: llama-server's and OpenAI's requests turned into requests of the client protocol, and back."""
