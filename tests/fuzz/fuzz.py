"""Run one target under atheris (libFuzzer, guided by the coverage of ``transport``).

    PYTHONPATH=.:tests/support python tests/fuzz/fuzz.py TARGET FOLDER [libFuzzer's options]

FOLDER keeps the corpus, which the target's own seeds begin, and whatever input breaks it: run
``fuzz.py TARGET FOLDER crash-...`` to see that one again. Options are those of libFuzzer, as
``-max_total_time=60`` or ``-seed=1``.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["transport"]):
    sys.path.insert(0, str(Path(__file__).parent))
    import targets


def main() -> None:
    name, folder, *options = sys.argv[1:]
    target, seeds = targets.TARGETS[name]
    corpus = Path(folder) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    again = [option for option in options if not option.startswith("-")]
    options = [option for option in options if option.startswith("-")]
    work = again or [str(corpus)]
    atheris.Setup(
        [sys.argv[0], f"-artifact_prefix={folder}/{name}-", "-timeout=10", *options, *work], target
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
