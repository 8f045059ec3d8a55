"""The lock of the keys and counts of vocabularies."""

from __future__ import annotations

import os
import threading

# Held while the keys or the counts of a vocabulary are read or written, but not while its layers
# change. So a thread that holds it never waits for other threads or ranks.
contents_lock = threading.RLock()

if hasattr(os, "register_at_fork"):  # does not exist on Windows
    # A fork waits, so that the contents are complete in the new process.
    os.register_at_fork(
        before=contents_lock.acquire,
        after_in_parent=contents_lock.release,
        after_in_child=contents_lock.release,
    )
