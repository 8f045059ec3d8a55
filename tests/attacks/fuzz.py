"""Fuzz everything that reads files, and print "N tried, M wrong" for each target.

    python -m tests.attacks.fuzz --minutes 10
    python -m tests.attacks.fuzz --minutes 1 record journal

`tests.attacks.targets` defines which results are correct. Each target starts from the files in
`tests/attacks/corpus`, and runs in its own process. If atheris is installed (`make .venv/fuzz`),
code coverage guides the changes to these files. Otherwise, the changes are random. Inputs that
produce wrong results are written to `build/fuzz/<target>/wrong-*`. After you fix a bug, add its
input to the corpus, which `make test` reads.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.attacks.mutations import mutate
from tests.support.paths import ROOT

CORPUS = Path(__file__).parent / "corpus"
BUILD = ROOT / "build" / "fuzz"
SLOW = ("tokenizer",)  # this target starts a process for each input
MEMORY_MB = 3000
SECONDS_PER_INPUT = 30
INSTRUMENTED = [
    *("hotrow.inputs", "hotrow.disk", "hotrow.vocabulary.key_file", "hotrow.lesson.times"),
    *("torch._weights_only_unpickler", "torch._utils", "json", "zipfile", "pickletools"),
]


def corpus(target: str) -> list[Path]:
    """Return the files from which a target starts."""
    return sorted((CORPUS / target).iterdir())


class Attacker:
    """Count the inputs of a target, and write inputs with wrong results to a folder.

    Attributes:
        tried: the number of inputs so far.
        wrong: the errors for inputs with wrong results, keyed by their location in the code.
    """

    def __init__(self, target: str, folder: Path) -> None:
        from tests.attacks.targets import attack

        self._attack, self._target, self._folder = attack, target, folder
        self.tried = self.accepted = 0
        self.wrong: dict[str, str] = {}

    def __call__(self, data: bytes) -> None:
        self.tried += 1
        try:
            self.accepted += self._attack(self._target, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            place = f"{type(error).__name__} {[(each.name, each.lineno) for each in frames]}"
            if place not in self.wrong:
                name = f"wrong-{hashlib.sha256(data).hexdigest()[:12]}"
                self.wrong[place] = f"{name}: {place}: {error}"[:400]
                (self._folder / name).write_bytes(data)
                print(self.wrong[place], file=sys.stderr, flush=True)

    def report(self) -> None:
        """Write the counts to a file, so that a crash doesn't lose them."""
        numbers = {"tried": self.tried, "accepted": self.accepted, "wrong": len(self.wrong)}
        (self._folder / "report.json").write_text(json.dumps(numbers))


def random_inputs(target: str, seed: int) -> Iterator[bytes]:
    """Yield the files of the corpus, then endlessly yield changed copies of them."""
    chance = random.Random(seed)
    files = [path.read_bytes() for path in corpus(target)]
    yield from files
    while True:
        yield mutate(chance.choice(files), chance)


def fuzz_randomly(target: str, seconds: float, folder: Path) -> None:
    """Attack a target with random changes."""
    attacker, end = Attacker(target, folder), time.monotonic() + seconds
    for data in random_inputs(target, time.time_ns()):
        (folder / "current").write_bytes(data)  # the file remains if its input crashes the process
        attacker(data)
        if time.monotonic() > end:
            break
    (folder / "current").unlink()
    attacker.report()


def uninstrumented() -> Iterator[str]:
    """Yield the hotrow modules that `INSTRUMENTED` does not include.

    atheris instruments all modules of a package. numba cannot compile instrumented functions.
    """
    for path in (ROOT / "src/hotrow").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        name = name.removesuffix(".__init__")
        if not name.startswith(tuple(INSTRUMENTED)):
            yield name


def fuzz_with_coverage(target: str, seconds: float, folder: Path) -> None:
    """Attack a target with changes guided by coverage."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, exclude=list(uninstrumented())):
        import tests.attacks.targets  # noqa: F401

    attacker = Attacker(target, folder)

    def attack(data: bytes) -> None:
        attacker(data)
        if attacker.tried % 20 == 0:
            attacker.report()

    def change(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return mutate(data, random.Random(seed), most)
        return atheris.Mutate(data, most)

    (folder / "inputs").mkdir(exist_ok=True)
    arguments = [
        f"-max_total_time={seconds:.0f}",
        f"-timeout={SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={folder}/wrong-",
        "-max_len=65536",
        *("-print_final_stats=0", "-verbosity=0"),
    ]
    atheris.Setup(
        [sys.argv[0], *arguments, str(folder / "inputs"), str(CORPUS / target)],
        attack,
        custom_mutator=change,
    )
    atheris.Fuzz()


def fuzz(target: str, seconds: float) -> bool:
    """Attack a target in another process, print the counts, and return whether it passed."""
    folder = BUILD / target
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.attacks.fuzz", "--inside", str(seconds), target]
    with (folder / "log").open("w") as log:
        limit = 2 * seconds + 300
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=limit)
            failed = done.returncode != 0
        except subprocess.TimeoutExpired:  # an input hangs
            failed = True
    numbers = json.loads(report.read_text()) if report.exists() else {}
    tried, accepted = numbers.get("tried", 0), numbers.get("accepted", 0)
    wrong = numbers.get("wrong", 0) + (failed or not tried)
    print(f"{target}: {tried:,} tried, {wrong} wrong ({accepted:,} accepted)", flush=True)
    if wrong:
        text = (folder / "log").read_text(errors="replace")
        print("\n".join(re.findall(r"wrong-.*", text)[:10]) or text[-2000:])
    return not wrong


def main() -> None:
    """Fuzz the targets, each in its own process, or one target in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--inside", type=float)
    parser.add_argument("targets", nargs="*")
    arguments = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    targets = arguments.targets or sorted(each.name for each in CORPUS.iterdir())
    if arguments.inside:
        (target,) = targets
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["OMP_NUM_THREADS"] = "1"
        run = fuzz_with_coverage if has_atheris and target not in SLOW else fuzz_randomly
        run(target, arguments.inside, BUILD / target)
        return
    how = "coverage-guided" if has_atheris else "random, because atheris is not installed"
    print(f"{len(targets)} targets, {arguments.minutes:g} minutes, {how}", flush=True)
    right = [fuzz(target, 60 * arguments.minutes / len(targets)) for target in targets]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
