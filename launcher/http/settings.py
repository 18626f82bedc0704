"""What the HTTP front end is started with, in one frozen value. Knows no flags (`launcher/serve.py`) and no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """`aliases` and `tags` are sorted; `defaults` are request fields (llama-server's names) that the command line sets;
    `chat_template` is Jinja source, "" for the file's own; `cors_origins` is "*", "localhost" or one origin."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 9931
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    api_keys: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)
    slots_endpoint: bool = True
    metrics_endpoint: bool = False
    props_endpoint: bool = False
    slot_save_path: str = ""
    page: bool = True
    prefix: str = ""
    jinja: bool = True
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prefill_assistant: bool = True
    reasoning_format: str = "deepseek"
    reasoning: str = "auto"
    verbose: bool = False
    context_shift: bool = False
    embeddings: bool = False
    pooling: str = "mean"
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    json_log: bool = False
    proxy: bool = False
    stop_seconds: float = 2.0
    sleep_seconds: float = -1.0
    max_body: int = 32 << 20
