"""Tables larger than memory: their rows and their optimizer's state in files, by touched pages.

`create` makes a folder with a table in it, `open` opens one. The files are mapped: what is read is
read from them, what training writes stays in memory until `save`, which puts all of it into the
files at once. Whenever a process or the machine stops, the folder holds the last completed save.
"""

from hotrow.disk.store import Store, create, open

__all__ = ["Store", "create", "open"]
