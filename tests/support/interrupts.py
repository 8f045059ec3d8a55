"""Send a signal before a given line of a call."""

import signal


class InterruptAt:
    """A trace function that sends a signal before the n-th line of the traced call.

    With `first_visits`, it doesn't count a line that the call has already run. When Python
    leaves a `with` block, it visits the `with` line again; only a trace function can raise there.
    """

    def __init__(self, line, first_visits=False, number=signal.SIGINT):
        self.line, self.count, self.first_visits = line, 0, first_visits
        self.number = number

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # Python ignores exceptions in the callbacks of the garbage collector.
        if code.co_filename.endswith("torch/autograd/profiler.py") or code.co_name == "gc_callback":
            return None
        visited = set()

        def trace_line(frame, event, argument):
            if event == "line" and not (self.first_visits and frame.f_lineno in visited):
                visited.add(frame.f_lineno)
                if self.count == self.line:
                    signal.raise_signal(self.number)
                self.count += 1
            return trace_line

        return trace_line
