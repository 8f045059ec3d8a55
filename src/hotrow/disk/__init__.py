"""Train tables larger than memory, with rows and optimizer state in memory-mapped files.

`create` creates a folder with a new table, and `open` opens an existing folder. Reads come directly
from the files. Pages changed by training stay in memory until `Store.save` writes them to the files
atomically. After a crash of the process or the machine, the folder contains the last completed
save. This package works only on Linux. Only one process at a time can open a folder.
"""

from hotrow.disk.creation import create
from hotrow.disk.store import Store, open, verify

__all__ = ["Store", "create", "open", "verify"]
