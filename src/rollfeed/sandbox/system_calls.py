"""The system calls that programs of models are refused, as a seccomp filter, at every isolation level of this machine.

Refused is what reaches far into the kernel and no answer needs: namespaces, mounts, io_uring, keys, shared memory and
messages of System V, looking into other processes, modules, clocks; sockets but those of Unix, of the internet and of
routing; memory outside of every folder's size (``memfd_create``) and the reservation of disk (``fallocate``). Calls
that are newer than the table are refused, too. To give up one's share of the cores does nothing: a program could have
it so that it is never run, which is no fault of a program.
"""

from __future__ import annotations

import errno
import os
import struct
from functools import cache

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, on aarch64
    "setns": (308, 268), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "perf_event_open": (298, 241), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "syslog": (103, 116), "vhangup": (153, 58),
    "fanotify_init": (300, 262), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "memfd_secret": (447, 447),
}  # fmt: skip
_MISSING: dict[str, tuple[int, int]] = {
    # As on a kernel without them: then programs and libraries do the same in another way.
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "memfd_create": (319, 279),
}  # fmt: skip
_SETPRIORITY = (141, 140)
_FALLOCATE, _CLONE, _UNSHARE, _SOCKET = (285, 47), (56, 220), (272, 97), (41, 198)
_FIRST_UNKNOWN = 463
"""From here on calls are newer than this table."""
_NEW_NAMESPACES = 0x7E02_0080
"""The flags of clone and unshare that make one: mount, cgroup, uts, ipc, user, pid, net, time."""
_CLONE_EXIT_SIGNAL = 0xFF
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_AF_NETLINK, _NETLINK_ROUTE = 16, 0

_ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""Place in the tables, and the kernel's number."""
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


@cache
def seccomp_filter(machine: str = "") -> bytes:
    """Return the filter as the kernel takes it, eight bytes an instruction; empty where it is not made for the machine.

    Args:
        machine: As :func:`os.uname` calls it; by default this one's.
    """
    found = _ARCHITECTURES.get(machine or os.uname().machine)
    if found is None:
        return b""
    place, architecture = found
    code = [_instruction(_LOAD, _ARCHITECTURE_AT), _instruction(_JUMP_IF_EQUAL, architecture, 1, 0)]
    code += [_instruction(_RETURN, _ERRNO | errno.ENOSYS), _instruction(_LOAD, _NUMBER_AT)]
    code += _if(_JUMP_IF_AT_LEAST, _FIRST_UNKNOWN, errno.ENOSYS)  # those of x32 as well
    for numbers in _MISSING.values():
        code += _if(_JUMP_IF_EQUAL, numbers[place], errno.ENOSYS)
    code += _if(_JUMP_IF_EQUAL, _FALLOCATE[place], errno.EOPNOTSUPP)  # then the C library writes instead
    code += _if(_JUMP_IF_EQUAL, _SETPRIORITY[place], 0)
    for row in _REFUSED.values():
        number = row[place]
        if number is not None:
            code += _if(_JUMP_IF_EQUAL, number, errno.EPERM)
    no_namespaces = _if(_JUMP_IF_ANY_BIT, _NEW_NAMESPACES & ~_CLONE_EXIT_SIGNAL, errno.EPERM)
    code += _of_argument(_CLONE[place], [_argument(0), *no_namespaces])
    code += _of_argument(_UNSHARE[place], [_argument(0), *_if(_JUMP_IF_ANY_BIT, _NEW_NAMESPACES, errno.EPERM)])
    code += _of_argument(_SOCKET[place], _sockets())
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _sockets() -> list[bytes]:
    code = [_argument(0)]
    for family in _SOCKET_FAMILIES:
        code += [_instruction(_JUMP_IF_EQUAL, family, 0, 1), _instruction(_RETURN, _ALLOW)]
    routing = [_argument(2), _instruction(_JUMP_IF_EQUAL, _NETLINK_ROUTE, 0, 1), _instruction(_RETURN, _ALLOW)]
    code += [_instruction(_JUMP_IF_EQUAL, _AF_NETLINK, 0, len(routing)), *routing]
    return [*code, _instruction(_RETURN, _ERRNO | errno.EPERM)]


def _of_argument(number: int, code: list[bytes]) -> list[bytes]:
    """Return ``code`` for one call only; it may load arguments, as the call is allowed where it comes to its end."""
    code = [*code, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_JUMP_IF_EQUAL, number, 0, len(code)), *code]


def _argument(place: int) -> bytes:
    return _instruction(_LOAD, _ARGUMENTS_AT + 8 * place)  # its lower half, which is all that the kernel looks at here


def _if(jump: int, value: int, error: int) -> list[bytes]:
    return [_instruction(jump, value, 0, 1), _instruction(_RETURN, _ERRNO | error)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
