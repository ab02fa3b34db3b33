"""Processes of test instances that begin as a fork of one that has imported everything.

An instance of a real model takes seven seconds of processor time to start, five of them for imports.
`server` is the process that has imported, `forker` asks it, `command` is the command line as such a
fork. What is forked becomes a child of who asked for it, so that exit codes, parent-death signals and
pidfds are those of the product; only the interpreter's own start and the imports are left out. Those have
tests of their own: `run_server(..., forked=False)`, `launch`, and every `deepinfer start`.
"""
