"""Compute kernels run from their SPIR-V by NumPy, with subgroups of 32 and matrix units as an H100 has them: so kernels
of such devices are proved where there is none. Slow, in lockstep, and stricter than a driver: what lies outside of a
buffer, a barrier that not all reach, and shared memory that another subgroup touches without one are errors
(values.Fault).

module.py reads a module, flow.py orders its blocks, values.py and memory.py have what lanes compute and what they read
and write, matrices.py the elements that each lane holds, operations.py what instructions compute, subgroups.py what
lanes tell one another, machine.py runs them, device.py is a Vulkan device whose programs do."""
