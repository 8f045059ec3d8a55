"""Call functions in forked children."""

import os
import warnings


def fork(function, *arguments):
    """Call a function in a forked child, and return the child's process number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has threads
        child = os.fork()
    if not child:
        status = 1
        try:
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return child


def run_in_child(function, *arguments):
    """Call a function in a forked child, and check that it raises no error."""
    assert os.waitstatus_to_exitcode(os.waitpid(fork(function, *arguments), 0)[1]) == 0
