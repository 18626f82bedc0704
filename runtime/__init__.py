"""The engine's core: model files, tokenizer, programs, placement, requests and the client protocol.

Imports no worker package: the workers import this one, and the coordinator reaches them only through the arena
and doorbells.
"""
