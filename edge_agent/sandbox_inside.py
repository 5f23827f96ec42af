"""What runs first inside a sandbox: it gives up rights, sets limits and then runs the program.

What always holds: the limits are in force, the rights given up and the system calls filtered before
the first byte of standard output, ``READY``, is written; nothing of the program has run by then.
Whatever fails before is the sandbox's own failure, whatever happens after it is the program's.

It imports nothing but the standard library, since nothing else is there. Standard input begins with
``FRAME`` and the three texts whose sizes that gives (the program, a check of it, and a word that
says that the check came to its end); what follows is the program's own input.
"""

import ctypes
import errno
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
_CALLS: Final = {
    # Architecture, then unshare setns mount shmget memfd_create add_key request_key keyctl,
    # then clone and socket.
    "x86_64": (0xC000003E, (272, 308, 165, 29, 319, 248, 249, 250), 56, 41),
    "aarch64": (0xC00000B7, (97, 268, 40, 194, 279, 217, 218, 219), 220, 198),
}
"""What would get round the limits (memory that no process is charged for, file systems of one's
own, new rights in a name space) or out of the sandbox (sockets of virtual machines)."""
_EVERYWHERE: Final = (428, 429, 430, 432)  # open_tree move_mount fsopen fsmount
_CLONE3: Final = 435
"""Its flags are out of a filter's reach; libraries fall back to clone."""
_NEW_SPACES: Final = 0x7E020000
_AF_VSOCK: Final = 40
_X32: Final = 0x40000000
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
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
    _filter_calls()
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


def _filter_calls() -> None:
    """A seccomp filter (``seccomp(2)``, classic BPF over ``struct seccomp_data``) for this process
    and all that it starts. Raises OSError where there can be none."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    architecture, numbers, clone, socket = _CALLS[machine]
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    steps = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), refuse,
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), refuse,
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]  # fmt: skip
    for number in (*numbers, *_EVERYWHERE):
        steps += [(_EQUAL, 0, 1, number), refuse]
    for number, test, value in ((clone, _ANY_BIT, _NEW_SPACES), (socket, _EQUAL, _AF_VSOCK)):
        steps += [(_EQUAL, 0, 3, number), (_LOAD, 0, 0, 16), (test, 0, 1, value), refuse]
        steps += [(_LOAD, 0, 0, 0)]  # the number again
    steps += [(_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    program = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(steps), ctypes.addressof(program))
    for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SECCOMP, _FILTER, described, 0, 0)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the filter of system calls is refused")


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
