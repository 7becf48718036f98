"""Interpreter of SPIR-V compute kernels in NumPy, with the subgroups of 32 and matrix units of an H100. It proves the
kernels of such devices on machines without one. It runs in lockstep, slowly, and is stricter than a driver: accesses
out of bounds, divergent barriers, and shared memory races between subgroups are errors (values.Fault).

module.py reads a module, flow.py orders its blocks, values.py and memory.py hold lane values and memory, matrices.py
the fragment layout, operations.py the arithmetic instructions, subgroups.py the subgroup operations, machine.py runs a
dispatch, device.py is a Vulkan device that runs programs this way.
"""
