"""Programs a person starts. They import `bloomery.runtime` and nothing of the workers."""

import os
import signal
import sys

# Ctrl-C while a program still imports its modules ends it as it ends any program, without a traceback; from
# `command_line.run_program` on it is an exception. Only for our own programs, not for whoever imports this package.
_ours = os.path.basename(sys.argv[0] if sys.argv else "").startswith("bloomery-") or sys.argv[:1] == ["-m"]
if _ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
