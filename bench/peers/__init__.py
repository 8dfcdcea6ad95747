"""Layby beside the engines its users could pick instead: same work, same machine, one run.

``python -m bench.peers`` sets each peer up in an environment of its own, runs the workloads in
turn and prints how many times as fast Layby is. README.md beside this folder tells the rest.
"""
