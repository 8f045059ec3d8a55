import threading
import time

from hotrow.kernels.cpu import rows


def test_threads_register_a_function_once(monkeypatch):
    registered = []

    def register_slowly(**options):
        time.sleep(0.05)  # the other thread arrives meanwhile
        return registered.append

    def update(w, grad, state, entry, flags):
        return w, state

    def build():
        rows.row_kernel(update, (), 1, update, update, 0)

    monkeypatch.setattr(rows, "register_jitable", register_slowly)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registered == [update]
