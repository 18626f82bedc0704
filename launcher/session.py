"""A program's connection with a daemon: the one that --endpoint names, or a private one that ends with the program.

Knows the client and how a private daemon is started. Does not know what a program asks of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bloomery.launcher.command_line import daemon_config, refuse_daemon_options
from bloomery.launcher.demo_model import chosen_draft, chosen_model
from bloomery.launcher.progress import ProgressDisplay
from bloomery.runtime.client import Client
from bloomery.runtime.private_daemon import PrivateDaemon


@contextmanager
def open_session(program: str, args: argparse.Namespace, **defaults: int | str) -> Iterator[Client]:
    """A client whose daemon is ready. `defaults` are DaemonConfig fields for a private daemon where the person said
    nothing. Raises BloomeryError for a model that cannot be used and for a daemon that cannot be reached."""
    with ExitStack() as stack:
        if args.endpoint is None:
            config = daemon_config(args, chosen_model(args), chosen_draft(args), **defaults)
            display = stack.enter_context(ProgressDisplay(program))
            daemon = stack.enter_context(PrivateDaemon(config, progress=display))
            client = Client(daemon.endpoint, runs=lambda: daemon.runs)
        else:
            refuse_daemon_options(args)
            client = Client(args.endpoint)
        yield stack.enter_context(client)
