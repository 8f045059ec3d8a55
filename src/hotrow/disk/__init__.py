"""Train tables larger than memory: their rows and optimizer state are in memory-mapped files.

`create` creates a folder with a table, `open` opens an existing one. Reads come from the files.
Pages that training writes stay in memory until `Store.save` writes them to the files, all or none.
After a crash of the process or the machine, the folder contains the last completed save. Linux
only; one process at a time can open a folder.
"""

from hotrow.disk.store import Store, create, open

__all__ = ["Store", "create", "open"]
