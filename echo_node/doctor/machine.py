"""Check the machine: Python, cores, memory, the limit of open files, and the GPU."""

from __future__ import annotations

import platform
import resource
import sys
from typing import Final

from echo_node.doctor.finding import Finding, lacking, point, well
from echo_node.engine.engine_classes import llama_offloads, torch_device
from echo_node.engine.host_resources import available_memory, cores, free_cores
from echo_node.errors import EchoError

LEAST_MEMORY: Final = 2**30
"""Bytes of free memory."""
LEAST_FILES: Final = 1_024
"""Open files: a seed holds 600 connections, and weights are read in pieces."""


def look() -> list[Finding]:
    return [_python(), _cores(), _memory(), _open_files(), _gpu(), *_llama_gpu()]


def _python() -> Finding:
    fine = (3, 11) <= sys.version_info[:2] <= (3, 13)
    fix = "make a new environment with Python 3.11, 3.12 or 3.13"
    return point("machine", "Python", fine=fine, says=platform.python_version(), fix=fix)


def _cores() -> Finding:
    return well("machine", "cores", f"{len(cores())}, of which {free_cores()} are free now")


def _memory() -> Finding:
    free = available_memory()
    if free is None:
        return lacking("machine", "memory", "this system does not tell", "give --max-memory when you join")
    says = f"{free / 1e9:.1f} GB free"
    fix = "end other programs: an engine with a small model takes 1 GB or more"
    return point("machine", "memory", fine=free > LEAST_MEMORY, says=says, fix=fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    fine = soft in {endless, -1} or soft >= LEAST_FILES
    can = hard in {endless, -1} or hard >= LEAST_FILES
    fix = (
        f"ulimit -n {LEAST_FILES * 4 if hard in {endless, -1} else min(hard, LEAST_FILES * 4)}"
        if can
        else f"let the system's administrator raise the limit of open files to {LEAST_FILES} or more"
    )
    says = "no limit" if soft in {endless, -1} else f"{soft} at once"
    return point("machine", "open files", fine=True if fine else None, says=says, fix=fix)


def _gpu() -> Finding:
    try:
        device = torch_device()
    except EchoError as error:
        return lacking("machine", "GPU", str(error), 'pip install --force-reinstall "echo-node[torch]"')
    says = f"torch computes on {device}" if device != "cpu" else "none that torch can use: the CPU computes"
    fix = "none is needed; if there is one, install its driver and torch's build for it (pytorch.org)"
    return point("machine", "GPU", fine=True if device != "cpu" else None, says=says, fix=fix)


def _llama_gpu() -> list[Finding]:
    """Report whether the installed build of llama.cpp can offload layers to a GPU."""
    try:
        offloads = llama_offloads()
    except EchoError as error:
        return [
            lacking("machine", "llama.cpp", str(error), 'pip install --force-reinstall "echo-node[llama]"')
        ]
    if offloads is None:
        return []
    says = "this build can use a GPU" if offloads else "this build cannot use a GPU: the CPU computes"
    fix = (
        "none is needed; with a GPU, rebuild it: "
        'CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-binary :all: llama-cpp-python'
    )
    return [point("machine", "llama.cpp", fine=True if offloads else None, says=says, fix=fix)]
