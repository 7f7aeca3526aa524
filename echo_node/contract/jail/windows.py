"""The jail of Windows: a job object of one process with a ceiling of memory and of processor time, which ends with its
parent. It keeps a contract from other processes and from taking the machine; files and network stay open to it.

Written from the system's documentation and not tried on a machine by those who wrote it: `layers()` shows what holds.
It knows nothing of contracts.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Final

from echo_node.contract.jail.layer import LayerError

PARENT_GONE: Final = 113

if sys.platform == "win32":
    from ctypes import wintypes

    _EXTENDED_LIMITS: Final = 9
    _UI_RESTRICTIONS: Final = 4
    _EVERY_UI_RESTRICTION: Final = 0xFF
    _PROCESS_TIME, _ACTIVE_PROCESSES, _PROCESS_MEMORY = 0x2, 0x8, 0x100
    _NO_ERROR_BOX, _KILL_ON_CLOSE = 0x400, 0x2000
    _SYNCHRONIZE: Final = 0x0010_0000
    _FOR_EVER: Final = 0xFFFF_FFFF

    class _Basic(ctypes.Structure):
        _fields_ = (
            ("process_time", ctypes.c_int64),
            ("job_time", ctypes.c_int64),
            ("flags", wintypes.DWORD),
            ("least_working_set", ctypes.c_size_t),
            ("most_working_set", ctypes.c_size_t),
            ("active_processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("priority", wintypes.DWORD),
            ("scheduling", wintypes.DWORD),
        )

    class _Extended(ctypes.Structure):
        _fields_ = (
            ("basic", _Basic),
            ("io_counters", ctypes.c_uint64 * 6),
            ("process_memory", ctypes.c_size_t),
            ("job_memory", ctypes.c_size_t),
            ("peak_process_memory", ctypes.c_size_t),
            ("peak_job_memory", ctypes.c_size_t),
        )

    def enter_job(memory_bytes: int, cpu_seconds: int) -> None:
        """Put this process into a job of its own. The job's handle stays open as long as the process lives."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = wintypes.HANDLE
        kernel.GetCurrentProcess.restype = wintypes.HANDLE
        job = wintypes.HANDLE(kernel.CreateJobObjectW(None, None))
        limits = _Extended()
        limits.basic.flags = (
            _PROCESS_TIME | _ACTIVE_PROCESSES | _PROCESS_MEMORY | _NO_ERROR_BOX | _KILL_ON_CLOSE
        )
        limits.basic.process_time = cpu_seconds * 10_000_000  # in units of 100 ns
        limits.basic.active_processes = 1
        limits.process_memory = memory_bytes
        for kind, given in (
            (_EXTENDED_LIMITS, limits),
            (_UI_RESTRICTIONS, wintypes.DWORD(_EVERY_UI_RESTRICTION)),
        ):
            if not kernel.SetInformationJobObject(job, kind, ctypes.byref(given), ctypes.sizeof(given)):
                raise LayerError(f"the job takes no limits: error {ctypes.get_last_error()}")
        me = wintypes.HANDLE(kernel.GetCurrentProcess())
        if not kernel.AssignProcessToJobObject(job, me):
            raise LayerError(f"the process cannot enter its job: error {ctypes.get_last_error()}")
        inside = wintypes.BOOL()
        if not kernel.IsProcessInJob(me, job, ctypes.byref(inside)) or not inside:
            raise LayerError("the system does not say that it holds")

    def watch(parent: int) -> None:
        """Start the thread that ends this process with its parent."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = wintypes.HANDLE
        held = wintypes.HANDLE(kernel.OpenProcess(_SYNCHRONIZE, False, parent))  # noqa: FBT003 -- a BOOL of theirs

        def wait() -> None:
            kernel.WaitForSingleObject(held, _FOR_EVER)
            os._exit(PARENT_GONE)

        threading.Thread(target=wait, name="jail watch", daemon=True).start()
