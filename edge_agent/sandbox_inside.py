"""What runs first inside a sandbox: it gives up rights, sets limits and then runs the program.

What always holds: the limits are in force and the rights given up before the first byte of standard
output, ``READY``, is written; nothing of the program has run by then. Whatever fails before is the
sandbox's own failure, whatever happens after it is the program's.

It imports nothing but the standard library, since nothing else is there. Standard input begins with
``FRAME`` and the three texts whose sizes that gives (the program, a check of it, and a word that
says that the check came to its end); what follows is the program's own input.
"""

import os
import resource
import struct
import sys
import types
from typing import Any, Final

READY: Final = b"\x06"
FRAME: Final = struct.Struct("<3I")
OUT_OF_MEMORY: Final = 128 + 9
"""Exit status after a MemoryError: as if the kernel had killed the program for it."""
PROGRAM: Final = "/tmp/program.py"  # noqa: S108 - a tmpfs of the sandbox's own


def main() -> None:
    """Run what standard input holds; ``argv`` is a user to become (0: stay), then NAME=LIMIT."""
    code, check, word = (_read(size) for size in FRAME.unpack(_read(FRAME.size)))
    with open(PROGRAM, "wb") as file:
        file.write(code)
    for argument in sys.argv[2:]:
        name, _, limit = argument.partition("=")
        resource.setrlimit(getattr(resource, name), (int(limit), int(limit)))
    if user := int(sys.argv[1]):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    sys.argv = [PROGRAM]
    sys.excepthook = _show
    # A program that is checked is a module to its check: what it does as a script is not wanted.
    module = types.ModuleType("program" if check else "__main__")
    module.__dict__["__file__"] = PROGRAM
    sys.modules[module.__name__] = module
    os.write(1, READY)
    exec(compile(code, PROGRAM, "exec"), module.__dict__)  # noqa: S102 - what all this is for
    if check:
        exec(compile(check, "check", "exec"), module.__dict__)  # noqa: S102
        sys.stdout.flush()
        os.write(1, word)


def _read(size: int) -> bytes:
    """Exactly so much of standard input, without taking any more of it."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise EOFError("standard input ended before the program")
        data += more
    return data


def _show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """The traceback without our own frames; ends the process when memory ran out."""
    if issubclass(kind, MemoryError):
        os.write(2, b"MemoryError\n")
        os._exit(OUT_OF_MEMORY)
    import traceback

    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    main()
